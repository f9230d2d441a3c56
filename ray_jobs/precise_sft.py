"""Precise fine-tuning as a Ray job: the same options as ``mathinterp tune precise``, on the cluster the job runs on.

    ray job submit --working-dir . -- python ray_jobs/precise_sft.py --model MODEL --heads 17.22,14.19 \
        --data gsm8k_train.jsonl --epochs 2 --workers 2 --gpu --store s3://bucket/results \
        --storage s3://bucket/training --out /shared/tuned
    mathinterp submit precise_sft --address http://HEAD:8265 -- --model MODEL --heads 17.22,14.19 ...

The job's driver computes nothing itself and needs no GPU; the workers do. --storage and --store must be places that
all nodes see; --out is written by the driver. Exit code 0 when the adapter is there; the same job again resumes.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the job's working directory holds the package

from mathinterp.cli.main import main

if __name__ == "__main__":
    main(["tune", "precise", "--address", "auto", *sys.argv[1:]])
