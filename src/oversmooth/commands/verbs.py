"""The verbs in their order, with an example each."""

from typing import Annotated

import typer

from oversmooth.commands.ablate import ablate
from oversmooth.commands.compare import compare
from oversmooth.commands.edit import edit
from oversmooth.commands.eval import eval_
from oversmooth.commands.finetune import finetune
from oversmooth.commands.gate import gate
from oversmooth.commands.help import Verb, Verbs, as_verb
from oversmooth.commands.inspect import inspect
from oversmooth.commands.list import list_
from oversmooth.commands.measure import measure
from oversmooth.commands.predict import predict
from oversmooth.commands.prune import prune
from oversmooth.commands.report import report
from oversmooth.commands.reproduce import reproduce
from oversmooth.commands.survey import survey
from oversmooth.commands.train import train
from oversmooth.commands.verify import verify
from oversmooth.commands.watch import watch

# --- an example of every verb, shown at the end of its help ---

EXAMPLES = {
    "inspect": (
        "oversmooth inspect path/to/model --heads",
        "oversmooth inspect model.gguf --format json",
        "oversmooth inspect owner/name --spectrum extremes",
    ),
    "verify": ("oversmooth verify path/to/model", "oversmooth verify path/to/model --print-declaration"),
    "measure": (
        "oversmooth measure path/to/model --data texts.txt --limit 8",
        "oversmooth measure timm_name --data images/ --metrics all -o values.csv",
        "oversmooth measure path/to/model --lengths 16,32,64 -o lengths.html",
    ),
    "predict": ("oversmooth predict path/to/model --what-if no_skip --what-if attnscale:0.5",),
    "report": (
        "oversmooth report path/to/model -o report.html --figures figures",
        "oversmooth report path/to/model -o report.html -o analysis.json",
        "oversmooth report analysis.json --card card.md",
        "oversmooth report runs/vanilla",
        "oversmooth report survey -o atlas.html",
    ),
    "compare": (
        "oversmooth compare before.json path/to/model -o compare.html",
        "oversmooth compare path/to/model sharpened --loss --data texts.txt",
        "oversmooth compare runs/vanilla runs/sharpen runs/smooth",
    ),
    "gate": (
        "oversmooth gate path/to/model --max-cosine 0.95 --rule max_between=0.8",
        "oversmooth gate path/to/model --config gate.toml -o gate.xml",
    ),
    "edit": (
        "oversmooth edit path/to/model --sharpen --layers 3-5 -o sharpened",
        "oversmooth edit path/to/model --sharpen --strength 0.25 --loss -o gentler",
        "oversmooth edit path/to/model --sharpen --sweep --layers 3-5 -o curve.html",
    ),
    "eval": ("oversmooth eval path/to/model --data texts.txt", "oversmooth eval edited --original path/to/model"),
    "ablate": ("oversmooth ablate path/to/model --data texts.txt --max-samples 16 -o ablation.csv",),
    "prune": (
        "oversmooth prune path/to/model --blocks 9-11 -o smaller",
        "oversmooth prune path/to/model --budget 0.25 --by loss --max-loss-increase 0.1 --data texts.txt -o smaller",
    ),
    "train": (
        "oversmooth train digits --variant sharpen --seed 1",
        "oversmooth train images --data path/to/folder",
        "oversmooth train cifar100 --data cifar-100-python.tar.gz --set training.epochs=10",
    ),
    "watch": ("oversmooth watch runs/vanilla runs/sharpen --open", "oversmooth watch trainer_output"),
    "finetune": ("oversmooth finetune path/to/encoder --tasks boolq,cb --data SuperGLUE --seeds 0,1,2",),
    "reproduce": ("oversmooth reproduce all -o reproduction",),
    "survey": (
        "oversmooth survey models.txt -o survey",
        "oversmooth survey --top 500 --pipeline-tag text-generation -o survey --workers 4",
        "oversmooth survey hf://EleutherAI/pythia-70m@step1000..step143000 -o training",
    ),
    "list": ("oversmooth list architectures llama", "oversmooth list plugins --format json"),
}


# --- all commands under one name, with what they share ---

app = typer.Typer(
    cls=Verbs,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={
        "help_option_names": ["-h", "--help"],
        "token_normalize_func": lambda name: name.replace("_", "-"),
    },
    help="Inspect, measure, predict and control oversmoothing in any Transformer.",
)


@app.callback(invoke_without_command=True)
def _root(version: Annotated[bool, typer.Option("--version", help="Show the version and exit.")] = False) -> None:
    if version:
        from importlib.metadata import version as version_of

        typer.echo(f"oversmooth {version_of('oversmooth')}")
        raise typer.Exit


PANELS = {
    "Look": (inspect, measure, predict, report, compare),
    "Check": (gate, verify),
    "Change": (edit, prune, ablate, eval_),
    "Many models, training": (survey, train, finetune, reproduce, watch, list_),
}
for panel, commands in PANELS.items():
    for command in commands:
        name = command.__name__.rstrip("_")  # `eval` and `list` are builtins
        app.command(name, cls=Verb, epilog="\n".join(EXAMPLES[name]), rich_help_panel=panel)(as_verb(command))
