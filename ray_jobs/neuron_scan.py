"""Neuron scan as a Ray job: the same options as ``mathinterp scan neurons``, on the cluster the job runs on.

    ray job submit --working-dir . -- python ray_jobs/neuron_scan.py --model MODEL --against head:17.22 --store s3://b/r
    mathinterp submit neuron_scan --address http://HEAD:8265 -- --model MODEL --against head:17.22 --store s3://b/r

The job's driver computes nothing itself and needs no GPU; the replicas do. Exit code 0 when every shard is there.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the job's working directory holds the package

from mathinterp.cli.main import main

if __name__ == "__main__":
    main(["scan", "neurons", "--address", "auto", *sys.argv[1:]])
