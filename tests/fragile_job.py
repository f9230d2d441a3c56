"""A precise fine-tuning whose process dies once; in a file of its own because Ray's workers import it."""

import os
import time
from dataclasses import dataclass
from pathlib import Path

from mathinterp.tuning.precise import PreciseJob


@dataclass(frozen=True)
class FragileJob(PreciseJob):
    """Its process dies once, after the last step and before anything of it is saved."""

    marker: str = ""

    def export(self, model, tokenizer, folder, base):
        if not os.path.exists(self.marker):
            Path(self.marker).write_text("died")
            time.sleep(1)  # by then Ray Train has taken the checkpoint before in
            os._exit(1)
        super().export(model, tokenizer, folder, base)
