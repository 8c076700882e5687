"""The same task synchronously and asynchronously, arm after arm: does playing ahead of the trainer pay?

python examples/tool_use/experiment.py --out results --seeds 0 1 2 3 4

Every pair of arm and seed has its own server, workers, rollouts and trainer, which run alone, all for the same time.
Seeds are outside, arms inside and turned by one with each seed, so that what else the machine does meets all arms. Each
pair appends a line to OUT/results.jsonl; what stands there is not run again. Then the table and the plot are made.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Final

import report

HERE: Final = Path(__file__).parent
STALENESS: Final = (1, 2, 4, 8)
CORRECTIONS: Final = ("none", "tis", "clip")

#: Arm -> arguments of train.py. The larger batches fill the time in which synchronous rollouts wait for the slowest.
ARMS: Final[dict[str, str]] = {
    "sync": "--max-staleness 0 --correction none",
    "sync-32-groups": "--max-staleness 0 --correction none --batch-groups 32",
    "sync-32-groups-lr2": "--max-staleness 0 --correction none --batch-groups 32 --lr 1.4e-3",
    **{
        f"async{staleness}-{correction}": f"--max-staleness {staleness} --correction {correction}"
        for staleness in STALENESS
        for correction in CORRECTIONS
    },
}


def order(arms: list[str], seed: int) -> list[str]:
    """The arms, turned by one place with each seed."""
    turn = seed % len(arms)
    return arms[turn:] + arms[:turn]


def run_pair(arm: str, seed: int, options: argparse.Namespace) -> dict[str, object]:
    """Run one arm with one seed; returns its line of the results."""
    folder = options.out / f"{arm}-seed{seed}"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    start = options.out.absolute() / f"start-{seed}.safetensors"
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    environment.pop("STREAMADV_REDIS_URL", None)  # `up` starts a server of its own
    if not start.exists():
        make = [sys.executable, str(HERE.absolute() / "policy.py"), str(start), "--seed", str(seed)]
        subprocess.run(make, check=True, env=environment)
    ends = f"--seconds {options.seconds} --target {options.target} --updates {options.updates}".split()
    rollouts = [str(HERE.absolute() / "rollouts.py"), "--seed", str(seed), "--latency", str(options.latency)]
    trainer = [str(HERE.absolute() / "train.py"), "--start", str(start), *ends, *ARMS[arm].split()]
    python = sys.executable
    up = [python, "-m", "streamadv", "up", "--", python, *rollouts, "--", python, *trainer]
    with (folder / "output.txt").open("w") as output:
        subprocess.run(up, cwd=folder, env=environment, stdout=output, stderr=output, check=True)
    updates = [json.loads(line) for line in (folder / "log.jsonl").open()]
    columns = ("seconds", "samples", "reward", "kl", "clipped", "staleness_mean", "staleness_max", "dropped")
    curves = {name: [update[name] for update in updates] for name in columns}
    return {"arm": arm, "seed": seed, "latency": options.latency, "load": os.getloadavg()[0], **curves}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, metavar="DIR")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument(
        "--arms", nargs="+", choices=list(ARMS), default=list(ARMS), metavar="ARM", help=", ".join(ARMS)
    )
    parser.add_argument("--seconds", type=float, default=150.0, help="of training, for every arm")
    parser.add_argument("--updates", type=int, default=1000, help="at most")
    parser.add_argument(
        "--target", type=float, default=0.8, help="mean reward of ten batches at which an arm ends"
    )
    parser.add_argument("--latency", type=float, default=0.1, help="median seconds of a tool call")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    results = options.out / "results.jsonl"
    done = {(line["arm"], line["seed"]) for line in report.read(results)}
    for seed in options.seeds:
        for arm in order(options.arms, seed):
            if (arm, seed) in done:
                continue
            begun = time.monotonic()
            line = run_pair(arm, seed, options)
            with results.open("a") as file:
                file.write(json.dumps(line) + "\n")
            print(
                f"{arm}, seed {seed}: {time.monotonic() - begun:.0f} s, {report.summary(line, options.target)}",
                flush=True,
            )
    report.write(options.out, options.target)


if __name__ == "__main__":
    main()
