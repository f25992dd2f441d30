"""What all cases of a run share: small models on disk, a saved analysis, short time limits."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import typer

from oversmooth.commands import verbs as app
from oversmooth.models.stores import remote as http
from tests.contract.tiny_models import tiny_model
from tests.fuzz import checkpoints, others, wholes
from tests.fuzz.cases import Case
from tests.fuzz.engine import Result
from tests.fuzz.oracles import judged, seeded

WEIGHTS = {
    "safetensors": 22,
    "pickle": 18,
    "gguf": 18,
    "config": 18,
    "options": 8,
    "server": 8,
    "analysis": 4,
    "data": 4,
    "quantised": 8,
    "recipe": 4,
    "survey": 4,
    "adapter": 4,
    "prune": 2,
}
"""Kinds of cases, and how often each is drawn."""
VOCABULARY = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "the", "a", "cat", "sat", "on", "##s", ".")


@dataclass(frozen=True)
class Setting:
    text_model: str
    image_model: str
    analysis: dict[str, Any]

    def case(self, kind: str, seed: int, index: int) -> Case:
        """The case of a number, the same whenever it is asked for."""
        rng = seeded(seed, index)
        kind = kind or rng.choices(list(WEIGHTS), list(WEIGHTS.values()))[0]
        match kind:
            case "analysis":
                return others.analysis_case(rng, self.analysis)
            case "data":
                return others.data_case(rng, self.text_model, self.image_model)
            case "options":
                return others.option_case(rng, self.text_model)
        makers = {
            "safetensors": checkpoints.safetensors_case,
            "pickle": checkpoints.pickle_case,
            "gguf": checkpoints.gguf_case,
            "config": others.config_case,
            "server": others.server_case,
            "quantised": wholes.quantised_case,
            "recipe": wholes.recipe_case,
            "survey": wholes.survey_case,
            "adapter": wholes.adapter_case,
            "prune": wholes.prune_case,
        }
        return makers[kind](rng)

    def judge(self, kind: str, seed: int, index: int) -> Result:
        torch.set_num_threads(1)
        case = self.case(kind, seed, index)
        # A rude server is soon given up; a sound one may be slow, because the machine is busy.
        http.ANSWER_SECONDS, http.SILENCE_SECONDS = (20.0, 12.0) if case.is_sound else (0.6, 0.3)
        verdict = judged(case)
        return Result(index, case.kind, verdict.outcome, verdict.failure, case.note)


def made(folder: Path) -> Setting:
    """Writes the models and the analysis into a folder, and builds the commands once for all cases."""
    app.app = typer.main.get_command(app.app)  # type: ignore[assignment]
    from transformers import BertTokenizerFast

    for case in ("bert", "vit"):
        tiny_model(case)[0].save_pretrained(folder / case)
    (folder / "vocab.txt").write_text("\n".join([*VOCABULARY, *(f"[unused{i}]" for i in range(80))]))
    BertTokenizerFast(str(folder / "vocab.txt")).save_pretrained(folder / "bert")
    (folder / "texts.txt").write_text("the cat sat on a cat .\n\na cat sat on the cats .")
    from oversmooth import analyze

    analysis = analyze(str(folder / "bert"), str(folder / "texts.txt"), max_tokens=16)
    return Setting(str(folder / "bert"), str(folder / "vit"), json.loads(analysis.to_json()))
