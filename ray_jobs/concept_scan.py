"""Concept scan as a Ray job: the same options as ``mathinterp scan concepts``, on the cluster the job runs on.

    ray job submit --working-dir . -- python ray_jobs/concept_scan.py --model MODEL --store s3://bucket/results
    mathinterp submit concept_scan --address http://HEAD:8265 -- --model MODEL --store s3://bucket/results

The job's driver computes nothing itself and needs no GPU; the replicas do. Exit code 0 when every shard is there.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the job's working directory holds the package

from mathinterp.cli.main import main

if __name__ == "__main__":
    main(["scan", "concepts", "--address", "auto", *sys.argv[1:]])
