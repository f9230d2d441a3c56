"""Evaluation as a Ray job: the same options as ``mathinterp evaluate``, on the cluster the job runs on.

    ray job submit --working-dir . -- python ray_jobs/evaluate.py --model MODEL --data-dir DATA --store s3://bucket/results
    mathinterp submit evaluate --address http://HEAD:8265 -- --model MODEL --data-dir DATA --store s3://bucket/results

The job's driver reads --data-dir and sends the items along; replicas need lm-eval but no data files. The driver
computes nothing itself and needs no GPU. Exit code 0 when every shard is there; the same job again resumes.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the job's working directory holds the package

from mathinterp.cli.main import main

if __name__ == "__main__":
    main(["evaluate", "--address", "auto", *sys.argv[1:]])
