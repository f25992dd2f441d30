"""What the shell offers behind TAB: values of options, and files where a target is expected; torch is not imported.

The lists repeat tables that live beside code which needs torch; a test compares each with its table.
"""

from collections.abc import Callable
from importlib.resources import files
from pathlib import Path

VALUES: dict[str, tuple[str, ...]] = {
    "basis": ("orthogonal", "general"),
    "claim": (
        *("all", "similarity", "eigenvalue", "skip", "norm-signs"),
        *("parametrization", "vision", "language", "baselines"),
    ),
    "dtype": ("stored", "float32", "bfloat16", "float16"),
    "engine": ("auto", "serial", "process", "ray"),
    "loss_task": ("causal language", "masked language", "classification", "similarity"),
    "metric": (
        *(
            "all",
            "steps",
            "attention",
            "cosine",
            "cosine_abs",
            "hfc_lfc",
            "log_hfc_lfc",
            "log_hfc_lfc_unit",
            "dirichlet",
            "residual",
            "effective_rank",
        ),
        *("effective_rank_share", "stable_rank", "token_norm", "token_norm_spread", "largest_norm", "massive"),
        *("matrix_entropy", "high_frequency"),
        *("influence", "angular_distance", "contribution", "alignment", "ceiling", "influence_smoothing"),
        *("influence_shared", "influence_differing", "undone"),
        *("attention_entropy", "effective_tokens", "sink_rate", "attention_rank"),
    ),
    "page_format": ("html", "md"),
    "part": ("attention", "feed-forward", "block"),
    "place": (
        *("all", "stream", "norms", "branches"),
        *("embedding", "other_sum", "attn_sum", "cross_sum", "ffn_sum", "final_norm", "attn_norm", "cross_norm"),
        *("ffn_norm", "attn_branch", "cross_branch", "ffn_branch"),
    ),
    "precision": ("float32", "float64"),
    "prefix_tokens": ("keep", "drop"),
    "printed_format": ("table", "md", "json"),
    "prune_by": ("influence", "loss"),
    "scale": ("cpu", "full"),
    "setting": ("superglue", "glue"),
    "task": ("superglue", "boolq", "cb", "copa", "multirc", "record", "rte", "wic", "wsc", "axb", "axg"),
    "variant": (
        *("vanilla", "sharpen", "smooth", "sharpen-measured", "smooth-measured", "free", "sharpen-start"),
        *("smooth-start", "no-identity", "matched"),
        *("attnscale", "featscale", "neutreno", "contranorm", "gfsa", "centered", "layerscale", "residual_scaling"),
        *("value_residual", "layernorm_scaling", "tempscale", "exclusive", "differential", "gate"),
    ),
    "what_if": (
        *("no_skip", "flip_norms", "positive_norms", "no_biases", "scale:", "interval:", "layerscale:"),
        *("residual_scaling:", "attnscale:", "featscale:", "centered", "gfsa:"),
        *("layernorm_scaling:", "tempscale:", "differential:", "gate:"),
    ),
}


def values(kind: str) -> Callable[[str], list[str]]:
    """Completes one of the known values; after a comma, the next one of a list."""

    def complete(incomplete: str) -> list[str]:
        before, comma, last = incomplete.rpartition(",")
        return [f"{before}{comma}{value}" for value in VALUES[kind] if value.startswith(last)]

    return complete


def targets(incomplete: str) -> list[str]:
    """Completes files and folders; a folder ends in a slash, so that one can go on inside."""
    path = Path(incomplete).expanduser()
    inside = path if incomplete.endswith("/") else path.parent
    start = "" if incomplete.endswith("/") else path.name
    written = incomplete[: len(incomplete) - len(start)] if start else incomplete
    try:
        found = sorted(entry for entry in inside.iterdir() if entry.name.startswith(start))
    except OSError:
        return []
    shown = [entry for entry in found if start.startswith(".") or not entry.name.startswith(".")]
    return [f"{written}{entry.name}{'/' if entry.is_dir() else ''}" for entry in shown]


def recipes(incomplete: str) -> list[str]:
    """Completes shipped recipes, and recipe files."""
    shipped = files("oversmooth") / "training" / "recipes"
    names = sorted(entry.name.removesuffix(".toml") for entry in shipped.iterdir() if entry.name.endswith(".toml"))
    return [name for name in names if name.startswith(incomplete)] + targets(incomplete)
