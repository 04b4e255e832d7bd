"""Trainers: parameter groups for RFA, and the two stages of distillation.

Distillation lets a converted model learn from the softmax model that it was made from, in two stages:

1. attention transfer: every RFA layer at once learns the softmax weights of the teacher's layer, on the teacher's inputs.
   Only feature maps and gates are trained. As the weights of a layer depend on its own φ alone, all layers learn
   independently (attention distillation as in Zhang et al. 2024, section 4.2, with random features as the initial values).
2. end to end: the whole model learns the teacher's logits, by KL(teacher ‖ model), and the text itself.
"""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.checkpoint import checkpoint
from transformers import (
    PreTrainedModel,
    PrinterCallback,
    Seq2SeqTrainer,
    Trainer,
    TrainerCallback,
    TrainerControl,
    TrainingArguments,
    set_seed,
)

from hf_rfa.convert.calibrate.activations import capture_inputs, layer_activations, layer_divergence, padding_masks
from hf_rfa.convert.checkpoint.base_model import rfa_layers
from hf_rfa.convert.inputs import Inputs
from hf_rfa.convert.plan import Progress
from hf_rfa.evaluation.perplexity import IGNORED_LABEL, nats_of_labels

from .param_groups import PARAMETER_KINDS, Rates, freeze, lora, parameter_groups
from .recipe import Stage
from .run_folder import last_checkpoint

#: Logits whose probabilities are held at once, in float32.
CHUNK_LOGITS = 2**21


class Watch(TrainerCallback):
    """Ends a training whose seconds are over or whose loss is not finite any more, and tells its steps, those that are left.

    Args:
        seconds: from the beginning of the training, or of its resumed part; None for no end by the clock.
        name: of the training, for ``progress``.
        progress: called with (name, number of steps) at the beginning, and with (None, 1) when a step is done.
    """

    def __init__(
        self, seconds: float | None = None, name: str = "training", progress: Progress = lambda step, total: None
    ) -> None:
        self.seconds, self.name, self.progress = seconds, name, progress
        self.start = time.monotonic()

    def time_over(self) -> float:
        """Return the share of the time that is over, from 0 to 1."""
        return 0.0 if self.seconds is None else min(1.0, (time.monotonic() - self.start) / self.seconds)

    def on_train_begin(self, args: Any, state: Any, control: TrainerControl, **kwargs: Any) -> None:
        """Start the clock, and tell the number of steps."""
        self.start = time.monotonic()
        self.progress(self.name, state.max_steps - state.global_step)

    def on_step_end(self, args: Any, state: Any, control: TrainerControl, **kwargs: Any) -> None:
        """Tell that a step is done, and end the training when the time is over."""
        self.progress(None, 1)
        if self.time_over() == 1.0:
            control.should_training_stop = control.should_log = True

    def on_log(self, args: Any, state: Any, control: TrainerControl, logs: Any = None, **kwargs: Any) -> None:
        """End the training if the loss that was logged is not finite."""
        if logs and not math.isfinite(float(logs.get("loss", 0.0))):
            control.should_training_stop = True


class GroupedTrainer(Trainer):
    """A `Trainer` whose optimizer, any that it knows, gets the groups of `parameter_groups`, under a `Watch`.

    Args:
        rates: learning rate by kind; a kind that is not named has ``args.learning_rate``, and 0 freezes it.
        watch: if it ends the training by the clock, the learning rate falls as a cosine of what is further on, the steps or
            the time.
    """

    def __init__(self, *args: Any, rates: Rates | None = None, watch: Watch | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.rates, self.watch = rates or {}, watch or Watch()
        self.add_callback(self.watch)

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        """Make the schedule of the learning rate once."""
        if self.watch.seconds is not None and self.lr_scheduler is None:

            def factor(step: int) -> float:
                return 0.5 + 0.5 * math.cos(math.pi * max(self.watch.time_over(), min(1.0, step / num_training_steps)))

            self.lr_scheduler = LambdaLR(cast(Any, optimizer or self.optimizer), factor)
        return super().create_scheduler(num_training_steps, optimizer)

    def create_optimizer(self, model: Any = None) -> torch.optim.Optimizer:
        """Make the optimizer once."""
        if self.optimizer is None:
            trained: Any = self.model if model is None else model
            rates = {kind: self.rates.get(kind, self.args.learning_rate) for kind in PARAMETER_KINDS}
            decayed = set(self.get_decay_parameter_names(trained))
            groups = parameter_groups(trained, rates, weight_decay=self.args.weight_decay, decayed=decayed)
            cls, options = self.get_optimizer_cls_and_kwargs(self.args, trained)
            self.optimizer = cls(groups, **options)
        return self.optimizer


class GroupedSeq2SeqTrainer(GroupedTrainer, Seq2SeqTrainer):
    """`Seq2SeqTrainer` with the groups of `GroupedTrainer`, which leaves the generation configuration as it is."""

    def prediction_step(self, model: Any, inputs: Any, prediction_loss_only: bool, *args: Any, **options: Any) -> Any:
        """Return the loss, (generated sequences, nats of the labels), and the labels of a batch.

        Without labels `Seq2SeqTrainer` generates alone; its own forward would not say the nats. It fills in the generation
        configuration with transformers' defaults: here a copy.
        """
        if prediction_loss_only or not cast(Any, self.args).predict_with_generate:
            return super().prediction_step(model, inputs, prediction_loss_only, *args, **options)
        trained: Any = self.model
        outputs: Any
        loss, outputs, labels = Trainer.prediction_step(self, model, inputs, prediction_loss_only=False)
        source = {name: each for name, each in inputs.items() if name != "labels" and not name.startswith("decoder_")}
        generation_config = trained.generation_config
        trained.generation_config = copy.deepcopy(generation_config)
        trained.generation_config.max_new_tokens = None  # it would win over generation_max_length
        try:
            _, sequences, _ = super().prediction_step(model, source, False, *args, **options)
        finally:
            trained.generation_config = generation_config
        logits = outputs[0] if isinstance(outputs, tuple) else outputs
        return loss, (sequences, label_nats(logits, cast(Tensor, labels))), labels


def label_nats(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the nats of labels of any shape, and `IGNORED_LABEL`, with which the Trainer pads, where they do not count."""
    nats = nats_of_labels(logits.flatten(0, -2), labels.flatten()).view_as(labels)
    return nats.masked_fill(labels == IGNORED_LABEL, IGNORED_LABEL)


def transfer_losses(model: nn.Module, teacher: PreTrainedModel, inputs: Inputs) -> Iterator[tuple[str, Tensor]]:
    """Yield KL(softmax weights ‖ weights of the features) of every RFA layer on one batch, in nats per query, [H] each.

    The projections of the RFA model are still the teacher's, and the inputs of its layers are those of the teacher's.
    """
    layers = rfa_layers(model)
    captured = capture_inputs(teacher, layers, inputs)
    masks = padding_masks(inputs)
    for name, layer in layers.items():
        if name not in captured:
            continue
        with torch.no_grad():
            activations = layer_activations(layer, captured[name], masks)[0]
        with torch.autocast(activations.key.device.type, enabled=False):
            loss = layer_divergence(layer, activations, captured.pop(name).hidden_states)
        yield name, loss


class DistillationTrainer(GroupedTrainer):
    """A trainer of one stage, with its settings and the softmax model."""

    def __init__(self, *args: Any, stage: Stage, teacher: PreTrainedModel, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.stage = stage
        self.teacher: Any = teacher
        self.model_accepts_loss_kwargs = False  # the losses are means over a batch


class AttentionTransferTrainer(DistillationTrainer):
    """Stage 1: the loss is the mean over heads and layers of `transfer_losses`."""

    def compute_loss(self, model: nn.Module, inputs: Any, *args: Any, **options: Any) -> Any:
        """Return the loss of one batch, whose gradients the parameters have already.

        They are computed layer by layer, so that the graph of one layer is held at a time. The backward pass of the Trainer
        adds nothing to them.
        """
        unwrapped: Any = self.accelerator.unwrap_model(model)
        total = torch.zeros((), device=unwrapped.device)
        for _, losses in transfer_losses(unwrapped, self.teacher, inputs):
            loss = losses.mean() / len(rfa_layers(unwrapped))
            if loss.requires_grad:
                self.accelerator.backward(loss)
            total += loss.detach()
        return total.requires_grad_()


class LogitDistillationTrainer(DistillationTrainer):
    """Stage 2: KL(teacher ‖ model) of the logits, and the loss on the text."""

    def compute_loss(self, model: nn.Module, inputs: Any, *args: Any, **options: Any) -> Any:
        """Return the loss of one batch."""
        model.train(self.stage.dropout)  # the modes differ in dropout alone
        share, labels = self.stage.kl_weight, inputs["labels"]
        unlabeled = {name: tensor for name, tensor in inputs.items() if name != "labels"}
        has_encoder = self.model.config.is_encoder_decoder  # type: ignore[union-attr]
        teacher_alone = share == 1 and (not has_encoder or "decoder_input_ids" in inputs)
        outputs = model(**(unlabeled if teacher_alone else inputs), use_cache=False)
        if share == 0:
            return outputs.loss
        with torch.no_grad(), self.accelerator.autocast():  # which the Trainer sets for the model alone
            expected = self.teacher(**unlabeled, use_cache=False).logits
        learned = labels != IGNORED_LABEL
        if not has_encoder:  # the logits of a token predict the label after it
            learned = F.pad(learned[:, 1:], (0, 1))
        divergence = logit_divergence(outputs.logits.flatten(0, 1), expected.flatten(0, 1), learned.flatten())
        return divergence if teacher_alone else share * divergence + (1.0 - share) * outputs.loss


def logit_divergence(logits: Tensor, expected: Tensor, learned: Tensor) -> Tensor:
    """Return the mean KL(softmax(expected) ‖ softmax(logits)) of the rows that are learned, in nats, float32.

    A vocabulary's probabilities are never held for all rows, which would take several times the memory of the logits: the
    backward pass computes them again, a few rows at a time. How many rows are learned is not asked, which would make the host
    wait for its device.

    Args:
        logits: the student's, [N, vocabulary], in any floating dtype, which their gradient has too.
        expected: the teacher's, [N, vocabulary]; they get no gradient.
        learned: which rows count, [N].
    """
    rows = max(1, CHUNK_LOGITS // logits.shape[-1])
    chunks = zip(logits.split(rows), expected.split(rows), learned.split(rows), strict=True)
    sums = [checkpoint(_summed_divergence, *chunk, use_reentrant=False, preserve_rng_state=False) for chunk in chunks]
    return torch.stack(sums).sum() / learned.sum()


def _summed_divergence(logits: Tensor, expected: Tensor, learned: Tensor) -> Tensor:
    """Return the sum of the divergences of those rows that are learned."""
    log_probs, expected_log_probs = (rows.float().log_softmax(-1) for rows in (logits, expected))
    divergences = F.kl_div(log_probs, expected_log_probs, reduction="none", log_target=True).sum(-1)
    return divergences.masked_fill(~learned, 0.0).sum()


@dataclass(frozen=True)
class StageResult:
    """A stage of training: its name, its optimizer steps, and the Trainer's log (losses, learning rates, gradient norms)."""

    name: str
    steps: int
    log: tuple[dict[str, float], ...]


def training_arguments(stage: Stage, folder: Path, *, seed: int) -> TrainingArguments:
    """Return the Trainer's arguments for one stage of a recipe, with its checkpoints in ``folder``."""
    return TrainingArguments(
        output_dir=str(folder),
        max_steps=stage.steps,
        per_device_train_batch_size=cast(int, stage.batch_size),
        learning_rate=stage.learning_rate,
        bf16=cast(bool, stage.bf16),
        torch_compile=stage.compiled,
        use_cpu=not torch.accelerator.is_available(),
        optim="adamw_torch",
        lr_scheduler_type="cosine",
        logging_steps=max(1, min(20, stage.steps // 50)),
        save_steps=max(1, min(500, stage.steps // 5)),
        save_total_limit=1,
        disable_tqdm=True,  # the caller shows progress, or nothing
        logging_nan_inf_filter=False,  # a loss that is not finite must not be replaced by the mean of those before
        report_to=[],
        remove_unused_columns=False,
        dataloader_pin_memory=torch.accelerator.is_available(),
        seed=seed,
    )


def train_stage(
    name: Literal["transfer", "end_to_end"],
    model: PreTrainedModel,
    teacher: PreTrainedModel,
    data: Any,
    stage: Stage,
    folder: Path,
    *,
    seed: int = 0,
    collate: Callable[[Any], Inputs] | None = None,
    max_seconds: float | None = None,
    resume: bool = False,
    progress: Progress = lambda step, total: None,
) -> StageResult:
    """Train a model in place: its feature maps and gates on the teacher's attention, or the whole of it end to end.

    Args:
        name: the stage; "transfer" needs a model whose projections are still the teacher's.
        model: the model.
        teacher: the softmax model, which may not share weights with ``model``.
        data: items of the training data.
        stage: the settings, with a batch size and a precision (`Recipe.resolve`).
        folder: of the Trainer's checkpoints.
        seed: of the order of the data, dropout and LoRA's initial values.
        collate: makes a batch of items of ``data``; None stacks them.
        max_seconds: see `Watch`.
        resume: continue from the last whole checkpoint in ``folder``, if there is one.
        progress: called with the steps, as by `hf_rfa.convert.convert`.

    Raises:
        FloatingPointError: if the loss is not finite.
    """
    transfer = name == "transfer"
    title = "attention transfer" if transfer else "end to end"
    rate = stage.rfa_learning_rate
    rates: Rates = {"feature_maps": rate, "sigma": rate, "gates": rate}
    if transfer:
        rates = {"projections": 0.0, "rest": 0.0}
    arguments = training_arguments(stage, folder, seed=seed)
    with ExitStack() as undone:
        for parameter in nn.ModuleList([model, teacher]).parameters():
            undone.callback(parameter.requires_grad_, parameter.requires_grad)
        # accelerate leaves a forward in the precision of this training, and a mark by which the next one would keep it.
        # `Accelerator.unwrap_model` would take transformers' wrappers of the forward off as well, and leave the mark.
        if "forward" in vars(model):
            undone.callback(setattr, model, "forward", model.forward)
        for left in ("forward", "_original_forward", "_is_accelerate_prepared"):
            undone.callback(vars(model).pop, left, None)
        undone.callback(model.eval)
        undone.callback(setattr, model.config, "use_cache", model.config.use_cache)  # which a Trainer turns off
        undone.callback(teacher.train, teacher.training)
        teacher.to(arguments.device).eval().requires_grad_(False)  # type: ignore[arg-type]
        if transfer:
            freeze(model, rates)
        elif stage.lora_rank:
            set_seed(seed)
            undone.enter_context(lora(model, stage.lora_rank))
        trainer = (AttentionTransferTrainer if transfer else LogitDistillationTrainer)(
            stage=stage,
            teacher=teacher,
            rates=rates,
            watch=Watch(max_seconds, title, progress),
            model=model,
            args=arguments,
            train_dataset=data,
            data_collator=collate,
        )
        trainer.remove_callback(PrinterCallback)  # a line for every loss; they are in the result
        result = trainer.train(resume_from_checkpoint=last_checkpoint(folder) if resume else None)
        finite = all(bool(parameter.isfinite().all()) for parameter in model.parameters())
    if not (math.isfinite(result.training_loss) and finite):
        raise FloatingPointError(
            f"{title}: the loss is {result.training_loss}. Lower the learning rate, or choose another feature map."
        )
    log = tuple({key: float(value) for key, value in entry.items()} for entry in trainer.state.log_history)
    return StageResult(title, trainer.state.global_step, log)
