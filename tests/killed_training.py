"""`oversmooth ARGUMENTS` in a process that kills itself, as a crash or a scheduler would: `MOMENT COUNT ARGUMENTS`.

The moment is the COUNT-th time that: a step ends, a file of a checkpoint is half written, a checkpoint is about to be
renamed, it has just been renamed, or a file of the final model is half written.
"""

import os
import signal
import sys

import safetensors.torch
import torch

from oversmooth.cli import main as command_line

MOMENTS = ("step", "half_written", "before_rename", "after_rename", "final_model")


def main() -> None:
    moment, count, *arguments = sys.argv[1:]
    left = int(count)

    def die_when_due() -> None:
        nonlocal left
        left -= 1
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)

    if moment == "step":
        from transformers.trainer_callback import CallbackHandler  # behind oversmooth, whose import hook it may need

        ended = CallbackHandler.on_step_end

        def on_step_end(self, *words):
            die_when_due()
            return ended(self, *words)

        CallbackHandler.on_step_end = on_step_end
    elif moment == "half_written":
        save = torch.save

        def half_saved(value, file, *words, **more):
            save(value, file, *words, **more)
            os.truncate(file, os.path.getsize(file) // 2)
            die_when_due()
            save(value, file, *words, **more)

        torch.save = half_saved
    elif moment in ("before_rename", "after_rename"):
        replace = os.replace

        def replaced(source, target, *words):
            is_checkpoint = "checkpoint-" in str(target)
            if is_checkpoint and moment == "before_rename":
                die_when_due()
            replace(source, target, *words)
            if is_checkpoint and moment == "after_rename":
                die_when_due()

        os.replace = replaced
    elif moment == "final_model":
        save_file = safetensors.torch.save_file

        def half_saved_file(tensors, file, *words, **more):
            save_file(tensors, file, *words, **more)
            if "checkpoint" not in str(file):
                os.truncate(file, os.path.getsize(file) // 2)
                die_when_due()

        safetensors.torch.save_file = half_saved_file
    else:
        raise AssertionError(f"no moment {moment}")
    sys.argv = ["oversmooth", *arguments]
    command_line()


if __name__ == "__main__":
    main()
