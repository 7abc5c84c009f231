"""The same training steps in PyTorch with DistributedDataParallel, plain and compiled, into the same records.

    python scripts/benchmark_torch.py vgg19 resnet50 bert --link sockets --out DIR

One process per GPU, NCCL; sizes, batch and type from configs/models/<model>.toml, matmuls in TF32 as XLA has
them. As there, steps on GPUs are timed several in a row, without waiting for each. For the models that torchvision
(vgg19, resnet50) and transformers (bert) have. The rows "PyTorch DDP" and "PyTorch DDP, torch.compile" go into the
record that scripts/benchmark.py made; they were not measured in turn with its rows, and say so by `not_in_turn`.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
import tomllib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

from evaluation.links import LINKS, prepare
from evaluation.record import FAILED, OK, CellName, Record, RecordError

CONFIGS = Path(__file__).resolve().parent.parent / "configs" / "models"
PLAIN, COMPILED = "PyTorch DDP", "PyTorch DDP, torch.compile"
WARM_UPS = 5
AT_ONCE_S, MOST_AT_ONCE = 0.2, 20
"""About what one measurement takes, and the most steps in it: as disco_hlo times its own."""


@dataclass(frozen=True)
class Model:
    """A module, one batch of its inputs, its loss and its optimizer."""

    module: Any
    batch: tuple[Any, ...]
    loss: Callable[[Any, tuple[Any, ...]], Any]
    optimizer: Any
    clip_norm: float | None = None


def vgg19(config: dict[str, Any], device: Any) -> Model:
    """torchvision's VGG19 with SGD."""
    import torchvision

    module = torchvision.models.vgg19(num_classes=config["classes"], dropout=config["dropout"])
    return _images(module.to(device), config, device)


def resnet50(config: dict[str, Any], device: Any) -> Model:
    """torchvision's ResNet50 with SGD."""
    import torchvision

    module = torchvision.models.resnet50(num_classes=config["classes"])
    return _images(module.to(device), config, device)


def _images(module: Any, config: dict[str, Any], device: Any) -> Model:
    import torch

    rows, image = config["batch_per_device"], config["image"]
    pictures = torch.randn(rows, 3, image, image, device=device)
    labels = torch.randint(config["classes"], (rows,), device=device)
    optimizer = torch.optim.SGD(
        module.parameters(), config["learning_rate"], config["momentum"], weight_decay=config["weight_decay"]
    )

    def loss(parallel: Any, batch: tuple[Any, ...]) -> Any:
        return torch.nn.functional.cross_entropy(parallel(batch[0]), batch[1])

    return Model(module, (pictures, labels), loss, optimizer)


def bert(config: dict[str, Any], device: Any) -> Model:
    """transformers' BERT for pre-training with AdamW; the word head sees the masked places alone."""
    import torch
    import transformers

    sizes = transformers.BertConfig(
        vocab_size=config["vocabulary"],
        hidden_size=config["width"],
        num_hidden_layers=config["layers"],
        num_attention_heads=config["heads"],
        intermediate_size=config["hidden"],
        max_position_embeddings=config["length"],
        hidden_dropout_prob=config["dropout"],
        attention_probs_dropout_prob=config["dropout"],
    )
    rows, length, masked = config["batch_per_device"], config["length"], config["masked"]

    class Masked(torch.nn.Module):
        """Word and next-sentence logits from tokens, segments and masked places."""

        def __init__(self) -> None:
            super().__init__()
            self.whole = transformers.BertForPreTraining(sizes)

        def forward(self, tokens: Any, segments: Any, places: Any) -> Any:
            out = self.whole.bert(input_ids=tokens, token_type_ids=segments)
            index = places[:, :, None].expand(-1, -1, config["width"])
            return self.whole.cls(out.last_hidden_state.gather(1, index), out.pooler_output)

    module = Masked().to(device)
    tokens = torch.randint(config["vocabulary"], (rows, length), device=device)
    segments = (torch.arange(length, device=device) >= length // 2).long().expand(rows, -1)
    places = torch.stack([torch.randperm(length, device=device)[:masked].sort()[0] for _ in range(rows)])
    words, following = tokens.gather(1, places), torch.randint(2, (rows,), device=device)
    optimizer = torch.optim.AdamW(
        module.parameters(), config["learning_rate"], weight_decay=config["weight_decay"], fused=True
    )

    def loss(parallel: Any, batch: tuple[Any, ...]) -> Any:
        word_logits, next_logits = parallel(*batch[:3])
        cross_entropy = torch.nn.functional.cross_entropy
        return cross_entropy(word_logits.flatten(0, 1), batch[3].flatten()) + cross_entropy(
            next_logits, batch[4]
        )

    return Model(module, (tokens, segments, places, words, following), loss, optimizer, config["clip_norm"])


MODELS: dict[str, Callable[[dict[str, Any], Any], Model]] = {
    "bert": bert,
    "resnet50": resnet50,
    "vgg19": vgg19,
}


@dataclass(frozen=True)
class Job:
    """What every process of one measurement is told."""

    make: Callable[[dict[str, Any], Any], Model]
    config: dict[str, Any]
    devices: int
    compiled: bool
    rounds: int
    meeting: str
    """A file that does not exist yet, by which the processes find each other."""
    result: str


def train(rank: int, job: Job) -> None:
    """One process: train, and on rank 0 write the step times in seconds, one per line."""
    import torch
    from torch.distributed import destroy_process_group, init_process_group

    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", rank) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
        torch.backends.cudnn.benchmark = True
    torch.manual_seed(rank)
    backend = "nccl" if on_gpu else "gloo"
    init_process_group(backend, init_method=f"file://{job.meeting}", rank=rank, world_size=job.devices)
    try:
        times = _steps(job, job.make(job.config, device), device, on_gpu)
    finally:
        destroy_process_group()
    if rank == 0:
        Path(job.result).write_text("".join(f"{seconds!r}\n" for seconds in times))


def _steps(job: Job, model: Model, device: Any, on_gpu: bool) -> list[float]:
    import torch
    from torch.nn.parallel import DistributedDataParallel

    parallel = DistributedDataParallel(
        model.module, device_ids=[device.index] if on_gpu else None, gradient_as_bucket_view=True
    )
    if job.compiled:
        parallel = torch.compile(parallel)

    def step() -> None:
        model.optimizer.zero_grad(set_to_none=True)
        model.loss(parallel, model.batch).backward()
        if model.clip_norm is not None:
            torch.nn.utils.clip_grad_norm_(model.module.parameters(), model.clip_norm)
        model.optimizer.step()

    def timed(steps: int) -> float:
        if not on_gpu:
            started = time.perf_counter()
            for _ in range(steps):
                step()
            return (time.perf_counter() - started) / steps
        began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        step()  # the clock starts with the device at work, as for ours
        began.record()
        for _ in range(steps):
            step()
        ended.record()
        torch.cuda.synchronize()
        return float(began.elapsed_time(ended)) / 1e3 / steps

    step_s = min(timed(1) for _ in range(WARM_UPS))
    at_once = _at_once(step_s, job.devices) if on_gpu else 1
    return [timed(at_once) for _ in range(job.rounds)]


def _at_once(step_s: float, devices: int) -> int:
    """How many steps a measurement takes, by the slowest process: all must take part in as many all-reduces."""
    import torch
    from torch.distributed import ReduceOp, all_reduce

    slowest = torch.tensor([step_s], device="cuda")
    if devices > 1:
        all_reduce(slowest, ReduceOp.MAX)
    return max(1, min(MOST_AT_ONCE, round(AT_ONCE_S / float(slowest))))


def measure(job: Callable[[str, str], Job]) -> list[float]:
    """Step times in seconds of rank 0.

    Raises:
        Exception: what the first process that failed raised.
    """
    from torch.multiprocessing import spawn

    with tempfile.TemporaryDirectory(prefix="benchmark_torch_") as folder:
        told = job(f"{folder}/meeting", f"{folder}/times")
        spawn(train, (told,), nprocs=told.devices, join=True)
        return [float(line) for line in Path(told.result).read_text().split()]


def row_of(times_s: list[float], default_ms: float | None) -> dict[str, Any]:
    """What goes into the record."""
    median_ms = 1e3 * statistics.median(times_s)
    low, _, high = (1e3 * value for value in statistics.quantiles(times_s, n=4))
    row = {
        "kind": "PyTorch",
        "status": OK,
        "reason": "",
        "not_in_turn": True,
        "median_ms": median_ms,
        "spread_ms": (high - low) / 2,
        "times_ms": [round(1e3 * seconds, 4) for seconds in times_s],
    }
    if default_ms:
        row |= {"of_default": median_ms / default_ms, "of_default_noise": (high - low) / median_ms}
    return row


def main() -> int:
    """Measure and record."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("models", nargs="+", choices=sorted(MODELS), metavar="MODEL", help=", ".join(MODELS))
    parser.add_argument("--link", choices=list(LINKS), required=True)
    parser.add_argument("--devices", type=int, choices=range(1, 65), default=2, metavar="N")
    parser.add_argument("--rounds", type=int, choices=range(2, 1000), default=20, metavar="N")
    parser.add_argument("--out", type=Path, required=True, help="folder of the records")
    args = parser.parse_args()
    prepare(os.environ, args.link, args.devices)
    args.out.mkdir(parents=True, exist_ok=True)
    try:
        for name in args.models:
            _cell(args, name)
    except RecordError as error:
        print(f"benchmark_torch.py: {error}", file=sys.stderr)
        return 2
    return 0


def _cell(args: argparse.Namespace, name: str) -> None:
    record = Record.open(args.out, CellName(name, "full", args.link, args.devices))
    config = tomllib.loads((CONFIGS / f"{name}.toml").read_text())["full"]
    default_ms = record.row("XLA default").get("median_ms")
    for row, compiled in ((PLAIN, False), (COMPILED, True)):
        if record.finished(row):
            continue

        def job(meeting: str, result: str, compiled: bool = compiled) -> Job:
            return Job(MODELS[name], config, args.devices, compiled, args.rounds, meeting, result)

        try:
            record.update(row, **row_of(measure(job), default_ms))
        except Exception as error:  # noqa: BLE001 - the record says what happened, and the next one is tried
            reason = f"{type(error).__name__}: {error}"[:2000]
            record.update(row, kind="PyTorch", status=FAILED, reason=reason)
        print(name, row, record.row(row).get("median_ms", record.row(row).get("reason")), flush=True)


if __name__ == "__main__":
    raise SystemExit(main())
