"""The paper's language models: Cramming-BERT on The Pile, then SuperGLUE."""
