"""One training of a recipe: fresh arithmetic sentences, through the package's own fine-tuning on Ray.

Knows mixtures and jobs; the loop, checkpoints and resuming are mathinterp.tuning's.
"""

import random
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from mathinterp.models.catalog import ModelSpec, resolve
from mathinterp.tuning.bases import plain_spec, trains_on_gpu
from mathinterp.tuning.data import Example, FreshSamples
from mathinterp.tuning.sft import SftConfig
from mathinterp.tuning.sft_ray import Tuning, TuningJob, TuningResult, fit, named
from recipes.examples import Mixture, draw_example

BETAS, WEIGHT_DECAY = (0.9, 0.98), 0.01
LOADER_PROCESSES = 12  # on a GPU, which trains small models faster than one process draws sentences


@dataclass(frozen=True)
class Draw:
    """Index -> sentence: a function of seed and mixture alone, so that a resumed run sees the same."""

    mixture: Mixture
    seed: int

    def __call__(self, index: int) -> Example:
        """The sentence of that number."""
        prompt = draw_example(random.Random(f"{self.seed}/{index}"), self.mixture)
        return Example(prompt.prompt_id, prompt.text, prompt.separator, prompt.answer)


@dataclass(frozen=True)
class Plan:
    """How much is trained, and where; one step is one batch of all workers."""

    steps: int
    batch: int
    lr: float
    seed: int = 0
    workers: int = 1
    warmup: int = 200  # steps
    checkpoint_every: int = 1000
    log_every: int = 50
    store: str = "results"
    storage: str | None = None
    address: str | None = None


def train_fresh(
    job: TuningJob, spec: ModelSpec, mixture: Mixture, plan: Plan, out: Path, say: Callable[[str], None]
) -> TuningResult:
    """Train ``job`` on sentences drawn afresh at every step, or resume that, and leave what was learnt in ``out``.

    Raises as ``mathinterp.tuning.finetune.tune`` does.
    """
    on_gpu = trains_on_gpu(None, plan.workers, plan.address)
    base = resolve(spec, "cuda" if on_gpu else "cpu")
    config = SftConfig(
        steps=plan.steps, batch_size=plan.batch, learning_rate=plan.lr, micro_batch=plan.batch // plan.workers or 1,
        seed=plan.seed, weight_decay=WEIGHT_DECAY, warmup_share=min(1.0, plan.warmup / plan.steps), betas=BETAS,
        schedule="linear", log_every=plan.log_every, checkpoint_every=plan.checkpoint_every,
        loader_processes=LOADER_PROCESSES if on_gpu else 0,
    )  # fmt: skip
    how = f"fresh {sorted(asdict(mixture).items())}, seed {plan.seed}"
    samples = FreshSamples(Draw(mixture, plan.seed), base.tokenizer, plan.steps * plan.batch, how)
    tuning = Tuning(
        job=job, model=plain_spec(base), model_fingerprint=base.fingerprint, samples=samples, held_out=(),
        config=config, data_label="fresh arithmetic", store_url=plan.store,
    )  # fmt: skip
    return fit(
        named(tuning, base), workers=plan.workers, gpu=None, out=out, storage=plan.storage, address=plan.address,
        say=say,
    )  # fmt: skip
