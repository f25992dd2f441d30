"""Published training runs as recipes: a TOML file with every number, one runner for all of them.

    recipe (TOML, `--set`) -> kind (vision, language) -> Job -> runner (Hugging Face Trainer) -> ordinary checkpoint

A kind turns its recipe into a `Job`; the runner knows nothing about images or text.
"""
