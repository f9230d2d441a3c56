"""LoRA layer sweep as a Ray job: the same options as ``mathinterp tune sweep``, on the cluster the job runs on.

    ray job submit --working-dir . -- python ray_jobs/lora_sweep.py --model MODEL --gpus-per-replica 0.5 \
        --store s3://bucket/results --out /shared/sweep
    mathinterp submit lora_sweep --address http://HEAD:8265 -- --model MODEL --store s3://bucket/r --out /shared/sweep

The job's driver computes nothing itself and needs no GPU; the replicas do, one trial (layer, learning rate) after
another on each. --out must be a folder that all nodes see: the adapters are written and read there. Exit code 0 when
every trial and comparison is there; the same job again keeps what is finished.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the job's working directory holds the package

from mathinterp.cli.main import main

if __name__ == "__main__":
    main(["tune", "sweep", "--address", "auto", *sys.argv[1:]])
