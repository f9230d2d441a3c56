"""The whole pipeline as a Ray job: the same options as ``mathinterp pipeline``, on the cluster the job runs on.

    ray job submit --working-dir . -- python ray_jobs/pipeline.py --model MODEL --store s3://bucket/results
    mathinterp submit pipeline --address http://HEAD:8265 -- --model MODEL --store s3://bucket/results
    python ray_jobs/pipeline.py --address local                    # on this machine, the bundled model, some minutes

Head scan, path patching, knock-out here and on other data, attention, MLP probe: then it prints the answer. The job's
driver computes nothing itself and needs no GPU; the replicas do. Exit code 0 when every shard of every run is there.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the job's working directory holds the package

from mathinterp.cli.main import main

if __name__ == "__main__":
    main(["pipeline", "--address", "auto", *sys.argv[1:]])
