"""Results as pages, tables and files; knows results and nothing else."""
