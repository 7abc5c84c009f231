"""Train the fused-op estimator on measured samples, and report how good it is.

    python scripts/train_estimator.py configs/estimator/train.toml cpu.sqlite -o out/cpu --weights cpu.safetensors
    python scripts/train_estimator.py configs/estimator/train.toml new.sqlite -o out/new --start cpu.safetensors

The first trains from scratch, the second fine-tunes: a few hundred samples of a new model or device will do. What
was interrupted goes on from its checkpoints when started again with the same output directory. `report.json` holds
all figures, `*.svg` the curves and the error distribution (DisCo, figure 9). Needs the extra `train` (Python 3.11).
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any

import msgspec
import numpy as np

from disco_hlo.errors import DiscoError, ProfileError
from disco_hlo.estimator import evaluation
from disco_hlo.estimator.architecture import PAPER, Architecture
from disco_hlo.estimator.dataset import Dataset, Split, TrainingData, load, model_split, noise, random_split
from disco_hlo.estimator.evaluation import Ridge, bars_and_curves, lines, pooled
from disco_hlo.estimator.features import selected
from disco_hlo.estimator.network import network as compiled_network
from disco_hlo.estimator.network import predicted_ns
from disco_hlo.estimator.weights import load_file, save_file

try:
    from disco_hlo.estimator import train as training
    from disco_hlo.estimator.train import Epoch, TrainSettings
except ImportError as error:
    print(f"train_estimator.py: {error}; install the extra `train` on Python 3.11", file=sys.stderr)
    raise SystemExit(2) from None


class SplitConfig(msgspec.Struct, forbid_unknown_fields=True):
    """How samples are put aside."""

    seed: int = 0
    test: Annotated[int, msgspec.Meta(ge=1)] = 2000
    validation: Annotated[int, msgspec.Meta(ge=1)] = 500


class ReportConfig(msgspec.Struct, forbid_unknown_fields=True):
    """What is tried beside the model itself."""

    leave_one_out: bool | list[str] = True
    """Whether every model is once left out of training, or which: ``llama`` leaves out all ``llama_...``. Where
    --start names weights, only those listed."""
    left_out: dict[str, Any] = {}
    """Settings of those trainings that differ."""
    fine_tune: list[Annotated[int, msgspec.Meta(ge=2)]] = []
    """Numbers of samples of a left-out model to fine-tune on: a fifth of them, one at least, to stop by."""
    compare: dict[str, dict[str, Any]] = {}
    """Other settings by name: the paper's model has the architecture "paper"."""


class Config(msgspec.Struct, forbid_unknown_fields=True):
    """The whole file."""

    train: dict[str, Any] = {}
    start: dict[str, Any] = {}
    """Settings that differ where --start names weights to go on from; without any, those for a few hundred samples."""
    split: SplitConfig = msgspec.field(default_factory=SplitConfig)
    report: ReportConfig = msgspec.field(default_factory=ReportConfig)


def settings_of(values: Mapping[str, Any]) -> TrainSettings:
    """Settings from a table of the file; ValueError or TypeError where it is bad."""
    values = dict(values)
    architecture = values.pop("architecture", {})
    if isinstance(architecture, str) and architecture != "paper":
        raise ProfileError(f'architecture {architecture!r}: expected "paper" or a table')
    if architecture == "paper":
        return TrainSettings(**values, architecture=PAPER)
    tuples: dict[str, Any] = {
        name: tuple(one) if isinstance(one, list) else one for name, one in architecture.items()
    }
    return TrainSettings(**values, architecture=Architecture(**tuples))


TAKEN_NAMES = (
    "main", "network", "started_from", "started_from_scaled", "network_without_op_times", "analytical", "linear",
    "noise_floor",
)  # fmt: skip
"""Rows of the report and checkpoints that no compared network may have the name of."""


def read_config(path: Path) -> Config:
    """The configuration file; ProfileError where it is bad."""
    try:
        return msgspec.toml.decode(path.read_bytes(), type=Config)
    except ValueError as error:
        raise ProfileError(f"{path}: {error}") from error


class Run:
    """One data set, one output directory."""

    def __init__(self, config: Config, data: TrainingData, out: Path, start: Any = None) -> None:
        self.config = config
        self.data = data
        self.out = out
        self.start = start
        """The network to go on from."""
        self.settings = self.changed({} if start is None else config.start)
        check_report(config, data)
        own = config.split
        self.split = random_split(data, own.seed, own.test, own.validation)
        """(a), of structures that no training saw."""
        self.report: dict[str, Any] = {}
        self.curves: dict[str, list[Epoch]] = {}
        (out / "checkpoints").mkdir(parents=True, exist_ok=True)

    def changed(self, changes: Mapping[str, Any]) -> TrainSettings:
        """The settings of the file with these changes."""
        settings = settings_of({**self.config.train, **changes})
        if self.start is None:
            return settings
        if not self.config.start:
            settings = fine_tuning(settings)
        return replace(settings, architecture=self.start.architecture)

    def trained(self, name: str, split: Split, settings: TrainSettings, start: Any = None) -> Any:
        """The network of a training called ``name``, which goes on from its checkpoint."""

        def say(epoch: Epoch) -> None:
            line = f"loss {epoch.train_loss:.4f}, validation error {epoch.validation_error:.3f}, {epoch.seconds:.1f} s"
            print(f"{name}: epoch {epoch.number + 1}/{settings.epochs}, {line}", flush=True)

        path = self.out / "checkpoints" / f"{name}.pt"
        network, curve = training.train(
            self.data, split, settings, checkpoint=path, start=start, on_epoch=say
        )
        self.curves[name] = curve
        self.report.setdefault("trainings", {})[name] = {
            "epochs": len(curve),
            "best_epoch": min(curve, key=lambda epoch: epoch.validation_error).number + 1,
            "seconds": round(sum(epoch.seconds for epoch in curve), 1),
            "train_samples": len(split.train),
            "curve": [[e.number, round(e.train_loss, 5), round(e.validation_error, 5)] for e in curve],
        }
        self.write()
        return network

    def write(self) -> None:
        """Everything known so far."""
        draft = self.out / ".report.json.part"
        draft.write_text(json.dumps(self.report, indent=1) + "\n")
        draft.replace(self.out / "report.json")

    def judged(self, predicted: Any, split: Split) -> dict[str, Any]:
        """All figures of predictions for the test samples."""
        truth = self.data.log_ns[split.test]
        error = evaluation.errors(predicted, truth)
        return {
            **evaluation.summary(error),
            "kendall_tau": evaluation.kendall_tau(predicted, truth),
            "by_decade": evaluation.by_decade(error, truth),
            "by_group": evaluation.by_group(error, self.data.group[split.test]),
        }

    def judged_network(self, network: Any, split: Split, *, blind: bool = False) -> dict[str, Any]:
        """The same of a network's predictions, which are told no op times where it is blind."""
        return self.judged(training.predict(network, self.data, split.test, blind=blind), split)

    # Parts of the report ----------------------------------------------------------------------

    def describe(self) -> None:
        """The data and its noise."""
        data = self.data
        floor = noise(data, data.fused)
        repeated = np.array([i for i in data.fused if len(data.repeated_ns[i]) > 1], np.int64)
        self.report["data"] = {
            # Without the notes on what was drawn.
            "about": {name: fact for name, fact in data.about.items() if ": " not in name},
            "samples": len(data),
            "fused": len(data.fused),
            "fused_per_model": dict(Counter(data.model[data.fused].tolist())),
            "measurements_per_sample": round(float(np.mean([len(t) for t in data.repeated_ns])), 2),
            "shortest_ns": round(float(np.exp(data.log_ns.min()))),
            "longest_ns": round(float(np.exp(data.log_ns.max()))),
        }
        self.report["noise_floor"] = {
            **evaluation.summary(floor),
            "by_decade": evaluation.by_decade(floor, data.log_ns[repeated]),
            "by_group": evaluation.by_group(floor, data.group[repeated]),
            "distribution": evaluation.distribution(floor),
        }

    def baselines(self, split: Split) -> dict[str, Any]:
        """The analytical estimate, and models without a graph."""
        data, estimate = self.data, np.log(self.data.known.estimate_ns)
        inputs = pooled(data.known)
        targets = data.log_ns - estimate
        learned = split.train[~data.is_single[split.train]]
        ridge = Ridge(inputs[learned], targets[learned])
        return {
            "analytical": self.judged(estimate[split.test], split),
            "linear": self.judged(estimate[split.test] + ridge.predict(inputs[split.test]), split),
        }

    def started_from(self, split: Split) -> dict[str, Any]:
        """What training started from, with the analytical estimate that it was trained to correct; and the same times
        the middle of measured over estimated in the training samples: what corrections would do at once."""
        if self.start is None or self.data.borrowed is None:
            return {}
        borrowed = replace(self.data, known=self.data.borrowed)
        learned = split.train[~borrowed.is_single[split.train]]
        off = np.median(borrowed.log_ns[learned] - training.predict(self.start, borrowed, learned))
        predicted = training.predict(self.start, borrowed, split.test)
        return {
            "started_from": self.judged(predicted, split),
            "started_from_scaled": {
                **self.judged(predicted + off, split),
                "factor": round(float(np.exp(off)), 4),
            },
        }

    def unseen_structures(self, weights: Path | None) -> None:
        """Split (a), and the weights that ship."""
        data, split = self.data, self.split
        network = self.trained("main", split, self.settings, self.start)
        predicted = training.predict(network, data, split.test)
        error = evaluation.errors(predicted, data.log_ns[split.test])
        self.report |= {
            "unseen_structures": {
                "network": self.judged(predicted, split),
                **self.started_from(split),
                "network_without_op_times": self.judged_network(network, split, blind=True),
                **self.baselines(split),
                "noise_floor": evaluation.summary(noise(data, split.test)),
            },
            "error_distribution": evaluation.distribution(error),
        }
        about = {
            **{name: data.about[name] for name in ("device_kind", "backend", "jax") if name in data.about},
            "samples": len(split.train),
            "test": evaluation.summary(error),
            "settings": json.loads(json.dumps(asdict(self.settings))),
        }
        exported = training.exported(network, data, about)
        for place in (self.out / "weights.safetensors", weights):
            if place is not None:
                save_file(exported, place)
        self.report["inference"] = self.inference(exported, split)
        self.write()

    def comparisons(self) -> None:
        """Other networks and losses on split (a)."""
        for name, changes in self.config.report.compare.items():
            compared = self.trained(name, self.split, settings_of({**self.config.train, **changes}))
            self.report["unseen_structures"][name] = self.judged_network(compared, self.split)
        self.write()

    def inference(self, exported: Any, split: Split) -> dict[str, Any]:
        """Cost of the exported network, and how far it is from the trained one."""
        ready = compiled_network(exported)
        chosen = split.test[:256]
        batch = selected(self.data.known, chosen)
        found = np.log(predicted_ns(ready, batch))
        reference = training.predict(training.imported(exported), self.data, chosen)
        spent = []
        for _ in range(50):
            started = time.perf_counter()
            predicted_ns(ready, batch)
            spent.append(1e6 * (time.perf_counter() - started) / len(chosen))
        return {
            "us_per_kernel_median": round(float(np.median(spent)), 2),
            "us_per_kernel_best": round(min(spent), 2),
            "largest_difference_from_torch": float(np.abs(found - reference).max()),
        }

    def left_out_models(self) -> None:
        """Split (b): every model once left out; then a little of it to fine-tune on."""
        section: dict[str, Any] = {}
        self.report["leave_one_model_out"] = section
        wanted = self.config.report.leave_one_out
        settings = self.changed({**(self.config.start if self.start else {}), **self.config.report.left_out})
        for model in wanted if isinstance(wanted, list) else sorted(set(self.data.model.tolist())):
            split = model_split(self.data, model, self.config.split.seed, self.config.split.validation)
            network = self.trained(f"without_{model}", split, settings, self.start)
            section[model] = {
                "network": self.judged_network(network, split),
                **self.started_from(split),
                **self.baselines(split),
                "noise_floor": evaluation.summary(noise(self.data, split.test)),
            }
            for count in self.config.report.fine_tune:
                section[model][f"fine_tuned_{count}"] = self.fine_tuned(model, network, split, count)
            self.write()
        for name in ("network", "analytical", "linear"):
            judged = [parts[name] for parts in section.values() if name in parts]
            if judged:
                self.report.setdefault("mean_of_models", {})[name] = {
                    "mean": round(float(np.mean([j["mean"] for j in judged])), 4),
                    "kendall_tau": round(float(np.mean([j["kendall_tau"] for j in judged])), 4),
                }

    def fine_tuned(self, model: str, network: Any, split: Split, count: int) -> dict[str, Any]:
        """The network after ``count`` samples of the model that it had never seen, judged on the others."""
        shuffled = np.random.default_rng(self.config.split.seed).permutation(split.test)
        learned, rest = shuffled[:count], np.sort(shuffled[count:])
        tuning = Split(np.sort(learned[: count * 4 // 5]), np.sort(learned[count * 4 // 5 :]), rest)
        settings = fine_tuning(self.settings)
        tuned = self.trained(f"without_{model}_tuned_{count}", tuning, settings, network)
        return self.judged_network(tuned, tuning)

    def figures(self) -> None:
        """Curves and error distribution as SVG."""
        curves = {
            name: [(e.number + 1, e.validation_error) for e in curve]
            for name, curve in self.curves.items()
            if not name.startswith("without_")
        }
        (self.out / "curves.svg").write_text(lines(curves, "epoch", "validation error"))
        found = self.report["error_distribution"]
        both = {"CDF": found["cdf"], "noise floor": self.report["noise_floor"]["distribution"]["cdf"]}
        (self.out / "errors.svg").write_text(bars_and_curves(found["right_end"], found["pdf"], both))


def check_report(config: Config, data: TrainingData) -> None:
    """Refuse now what would only be found after the first training; ProfileError, ValueError or TypeError."""
    wanted = config.report
    if isinstance(wanted.leave_one_out, list):
        for model in wanted.leave_one_out:
            model_split(data, model, config.split.seed, config.split.validation)
    for changes in (wanted.left_out, *wanted.compare.values()):
        settings_of({**config.train, **changes})
    for name in wanted.compare:
        if name in TAKEN_NAMES or not re.fullmatch(r"[A-Za-z0-9_-]+", name) or name.startswith("without_"):
            raise ProfileError(
                f"compare.{name}: expected a name of letters, digits, _ and - that no row of the report has yet"
            )
    if wanted.leave_one_out and wanted.fine_tune:
        model, fused = min(Counter(data.model[data.fused].tolist()).items(), key=lambda item: item[1])
        if max(wanted.fine_tune) >= fused:
            raise ProfileError(
                f"cannot fine-tune on {max(wanted.fine_tune)} samples of {model}: it has {fused} fused ones"
            )


def fine_tuning(settings: TrainSettings) -> TrainSettings:
    """Fewer and smaller steps than from scratch."""
    return replace(
        settings, epochs=30, learning_rate=settings.learning_rate / 4, batch=min(settings.batch, 32)
    )


def main() -> int:
    """Parse, check, train, report."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("config", type=Path, help="such as configs/estimator/train.toml")
    parser.add_argument("data", type=Path, help="data set made by scripts/sample_fused_ops.py")
    where = "where everything is written"
    parser.add_argument("-o", "--out", type=Path, required=True, metavar="DIR", help=where)
    parser.add_argument("--weights", type=Path, metavar="FILE", help="also write the trained weights here")
    fine_tuned = "weights to fine-tune instead of training anew"
    parser.add_argument("--start", type=Path, metavar="FILE", help=fine_tuned)
    args = parser.parse_args()
    try:
        config = read_config(args.config)
        if args.weights and (args.weights.is_dir() or not args.weights.absolute().parent.is_dir()):
            raise ProfileError(f"--weights {args.weights}: expected a file in a folder that exists")
        if not args.data.is_file():
            raise ProfileError(f"there is no data set {args.data}; make one with scripts/sample_fused_ops.py")
        start = load_file(args.start) if args.start else None
        with Dataset(args.data) as dataset:
            data = load(dataset, start.device if start else None)
        run = Run(config, data, args.out, training.imported(start) if start else None)
        run.describe()
        run.unseen_structures(args.weights)
        if isinstance(config.report.leave_one_out, list) or (config.report.leave_one_out and not start):
            run.left_out_models()
        run.comparisons()
        run.figures()
        run.write()
    except (DiscoError, OSError, ValueError, TypeError) as error:
        print(f"train_estimator.py: {error}", file=sys.stderr)
        return 2
    print_summary(run.report)
    return 0


def print_summary(report: Mapping[str, Any]) -> None:
    """The main figures as a table."""
    print(f"\n{'unseen structures':28} {'mean':>7} {'median':>7} {'p90':>7} {'<=10 %':>7} {'tau':>7}")
    for name, row in report["unseen_structures"].items():
        if "mean" in row:
            tau = f"{row['kendall_tau']:7.3f}" if "kendall_tau" in row else ""
            print(
                f"{name:28} {row['mean']:7.3f} {row['median']:7.3f} {row['p90']:7.3f} {row['within_10']:7.3f} {tau}"
            )


if __name__ == "__main__":
    raise SystemExit(main())
