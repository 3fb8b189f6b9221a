"""Peak memory of a worker that trains one stage alone, against one that trains the whole model.

    python scripts/blocktrain_memory.py

Each is measured in a process of its own, width 512, two layers in each of four stages. Lines go to
docs/results/blocktrain_memory.jsonl, and what stands there is not measured again.
"""

import argparse
import resource
import subprocess
import sys

import msgspec
import torch
from blocktrain_report import Memory, read_lines
from study_blocktrain import ALONE, CONCAT, GREEDY, MEMORY, POOLED, SINGLE, Case, config_of

from subnet.adapters.corpus import make_corpus
from subnet.config import OptimizerKind, RunConfig, RunKind
from subnet.model.init import initial_params
from subnet.model.partition import neighbours_of, num_elements
from subnet.training.pipeline import StageWorker
from subnet.types import Epoch, SampleId, StageIndex

VECTORS = 5
"""As long as the params, that a worker holds: master params, live version, gradients, and AdamW's two moments."""
MEMORY_CASES = (
    Case("end_to_end", layers=8),
    Case("greedy", layers=8, blocktrain=GREEDY, workers=ALONE),
    Case("pooled", layers=8, blocktrain=POOLED, workers=ALONE),
    Case("diffusion_single", layers=8, blocktrain=SINGLE, workers=ALONE),
    Case("diffusion_concat", layers=8, blocktrain=CONCAT, workers=ALONE),
)


def large_config(case: Case) -> RunConfig:
    """Of the measurement of memory."""
    config = config_of(case, 0)
    model = msgspec.structs.replace(config.model, width=512, num_heads=8, num_kv_heads=8, ffn_width=1408)
    training = msgspec.structs.replace(
        config.training, microbatch_size=8, num_tokens=128, optimizer=OptimizerKind.ADAMW
    )
    return msgspec.structs.replace(config, model=model, training=training)


def peak_bytes() -> int:
    """Largest resident size of this process so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def measure_memory(case: Case, stage: StageIndex) -> Memory:
    """In a process of its own: what a worker of `stage` adds to a process that has loaded everything but the model."""
    config = large_config(case)
    corpus = make_corpus(config)
    tokens = [corpus.tokens(Epoch(0), SampleId(step)) for step in range(3)]
    torch.ones(256, 256).matmul(torch.ones(256, 256))
    before = peak_bytes()
    worker = StageWorker(config, stage)
    worker.load(initial_params(config, stage))
    neighbours = neighbours_of(config, stage)
    if config.kind is RunKind.BLOCKTRAIN:
        worker.load_neighbours({other: initial_params(config, other) for other in neighbours})
    for step, ids in enumerate(tokens):
        worker.forward((0, step, 0), ids, None)
        worker.backward((0, step, 0), None)
        worker.step()
    held = VECTORS * num_elements(config, stage) + sum(num_elements(config, other) for other in neighbours)
    return Memory(case.name, int(stage), measured=peak_bytes() - before, held=4 * held)


def memory_of_all() -> None:
    """A line for each case and its first and last stage; what stands there is not measured again."""
    done = {(found.case, found.stage) for found in read_lines(MEMORY, Memory)}
    for case in MEMORY_CASES:
        num_stages = large_config(case).training.num_stages
        for stage in sorted({0, num_stages - 1}):
            if (case.name, stage) in done:
                continue
            line = [sys.executable, __file__, "--measure", case.name, str(stage)]
            found = subprocess.run(line, check=True, capture_output=True).stdout
            with MEMORY.open("ab") as file:
                file.write(found)
            print(found.decode().strip(), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--measure", nargs=2, metavar=("CASE", "STAGE"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if not options.measure:
        memory_of_all()
        return
    case = next(case for case in MEMORY_CASES if case.name == options.measure[0])
    print(msgspec.json.encode(measure_memory(case, StageIndex(int(options.measure[1])))).decode())


if __name__ == "__main__":
    main()
