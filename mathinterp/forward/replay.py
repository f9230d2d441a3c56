"""The fast engine: tree-packed prompts, layers l.. replayed from cached residuals, many edits in one batch.

Ablating something in layer l changes nothing before layer l, so only layers l..L-1 run, from the cached
input of layer l; in layer l itself attention is known up to the edited heads; in the last layer only answer
positions go on. Equal to full forward passes with hooks (forward/plain.py) up to rounding; tested in float64.

Shape legend: P pack, N tree node, R row (pack x edit), A answer token, E edit, D model width, Z o_proj input width.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from mathinterp.forward.edits import Edit, PlacedReplacement, Replacement
from mathinterp.forward.hooks import caught_input, caught_output
from mathinterp.forward.layers import Call, RecordedCalls, call_layer, joined, record, standing_in
from mathinterp.forward.plain import PlainEngine
from mathinterp.forward.scores import Answers, ScoreBoard, Scores, answers_of, check_finite, score
from mathinterp.forward.tree import Forest, count_nodes, plant
from mathinterp.models.anatomy import Anatomy
from mathinterp.prompts.prompt import TokenizedPrompt

CPU_TOKENS = 1024  # token rows in one batch: a width-256 layer's activations stay in the cache
GPU_TOKENS = 16896  # 132 x 128: whole waves of 128-row tiles on the 132 multiprocessors of an H100
MASK_ALIGNMENT = 8  # a GPU's fused attention wants mask rows in multiples of eight elements
CPU_PACK_SIZES = (64, 96, 128, 192, 256, 384, 512, 768, 1024)
GPU_PACK_SIZES = (132, 176, 264, 352, 528, 1056)  # divide GPU_TOKENS / 16 edits
CACHE_SHARE = 0.4  # of the free device memory that cached residuals may take


@dataclass(frozen=True)
class Group:
    """Packs that run in one batch, and the answer tokens in them."""

    packs: np.ndarray  # consecutive
    answers: torch.Tensor  # A' indices into the answers
    gold: torch.Tensor  # A' gold token ids
    answer_rows: torch.Tensor  # A' row (pack within the group) of each answer token
    answer_slots: torch.Tensor  # A' column of each answer token in slots_PM
    slots_PM: torch.Tensor  # nodes at which the last layer's output is wanted, padded with node 0

    @property
    def span(self) -> slice:
        """The packs as a slice, which indexes without a copy."""
        return slice(int(self.packs[0]), int(self.packs[-1]) + 1)


class PackedEngine:
    """Scores answer tokens under edits of heads or MLPs, on tree-packed prompts.

    Args:
        anatomy: the model; its weights decide device and dtype.
        prompts: tokenized prompts.
        private_from: see ``tree.plant``.
        edits_per_batch: how many edits a scan asks for at once; sets how many packs run together.
        max_tokens: most token rows in one batch; halved for good when memory runs out.
        pack_size: nodes a pack aimed at; None = the size of least work.
        compiled: compile whole layers (worth it on CUDA for long runs).
    """

    name = "packed"

    def __init__(
        self,
        anatomy: Anatomy,
        prompts: Sequence[TokenizedPrompt],
        *,
        private_from: Sequence[int] | None = None,
        edits_per_batch: int = 16,
        max_tokens: int | None = None,
        pack_size: int | None = None,
        compiled: bool = False,
    ):
        self.anatomy, self.prompts = anatomy, prompts
        self.device, self.dtype = anatomy.device, anatomy.dtype
        self.answers: Answers = answers_of(prompts)
        self.max_tokens = max_tokens or (GPU_TOKENS if self.device.type == "cuda" else CPU_TOKENS)
        sequences = [prompt.fed for prompt in prompts]
        pack_size = pack_size or best_pack_size(anatomy, sequences, private_from, on_gpu=self.device.type == "cuda")
        together = max(1, self.max_tokens // (pack_size * edits_per_batch))
        self.edits_per_batch = max(1, min(edits_per_batch, self.max_tokens // (pack_size * together)))
        self.forest = plant(
            sequences,
            pack_size=pack_size,
            private_from=private_from,
            packs_multiple_of=together,
            alignment=MASK_ALIGNMENT if self.device.type == "cuda" else 1,
        )
        self.groups = _group(self.forest, self.answers, together, self.device)
        self._call = torch.compile(call_layer, dynamic=False) if compiled else call_layer
        self._baseline: Scores | None = None
        self._run_clean_pass()

    # ---- clean pass ----

    @torch.inference_mode()
    def _run_clean_pass(self) -> None:
        """Record layer arguments and cache every layer's input.

        In half precision a product's last bits depend on the shape of its batch, and clean and edited values are
        compared: there the clean pass runs as many packs at once as edited passes have rows.
        """
        anatomy, forest = self.anatomy, self.forest
        shape = (anatomy.shape.n_layers, forest.n_packs, forest.pack_size, anatomy.shape.d_model)
        self.residual_LPND = torch.empty(shape, dtype=self.dtype, device=self._cache_device(math.prod(shape)))
        self.calls = [record(anatomy, forest, group.packs, self._keeper(group)) for group in self.groups]
        if self._shape_matters:
            self._rerun_in_batches_of_edits()

    def _keeper(self, group: Group) -> Callable[[int, torch.Tensor], None]:
        def keep(layer: int, hidden_PND: torch.Tensor) -> None:
            self.residual_LPND[layer, group.span] = hidden_PND.to(self.residual_LPND.device)

        return keep

    def _rerun_in_batches_of_edits(self) -> None:
        """The clean pass again, as many packs at once as edited passes have rows."""
        for start in range(0, len(self.groups), self.edits_per_batch):
            indices = [i % len(self.groups) for i in range(start, start + self.edits_per_batch)]
            packs = torch.from_numpy(np.concatenate([self.groups[i].packs for i in indices]))
            calls = joined([self.calls[i] for i in indices])
            hidden = calls.embedded_PND
            for layer in range(self.anatomy.shape.n_layers):
                self.residual_LPND[layer, packs] = hidden.to(self.residual_LPND.device)
                if layer < self.anatomy.shape.n_layers - 1:  # in every pass the last one runs at answer positions only
                    hidden = self._layer(layer, hidden, calls.layer[layer])

    @property
    def _shape_matters(self) -> bool:
        """Whether the shape of a batch changes more than the very last bits of a result."""
        return self.dtype not in (torch.float32, torch.float64)

    def _copies(self, needed: int) -> int:
        """Rows to fill a batch with: all of them where the batch shape matters, else those needed."""
        return self.edits_per_batch if self._shape_matters else needed

    def _cache_device(self, elements: int) -> torch.device:
        if self.device.type != "cuda":
            return self.device
        free, _ = torch.cuda.mem_get_info(self.device)
        wanted = elements * torch.empty(0, dtype=self.dtype).element_size()
        return self.device if wanted < CACHE_SHARE * free else torch.device("cpu")

    def _residual(self, layer: int, group: Group) -> torch.Tensor:
        """Input of ``layer`` (P N D) for the packs of ``group``, on the model's device."""
        return self.residual_LPND[layer, group.span].to(self.device)

    def _layer(self, layer: int, hidden: torch.Tensor, call: Call) -> torch.Tensor:
        return self._call(self.anatomy.layers[layer], hidden, call.args, dict(call.kwargs))

    # ---- what other passes want to know about the clean one ----

    @torch.inference_mode()
    def token_values(self, site: str, layer: int, prompt_n: np.ndarray, token_n: np.ndarray) -> torch.Tensor:
        """Clean activations of the n tokens: n Z ("head": o_proj's input) or n D ("mlp": the MLP's output)."""
        values_PNZ = torch.cat(
            [self._clean_site(site, layer, g, calls) for g, calls in zip(self.groups, self.calls, strict=True)]
        )
        return values_PNZ.flatten(0, 1)[torch.from_numpy(self._nodes(prompt_n, token_n)).to(self.device)]

    def _nodes(self, prompt_n: np.ndarray, token_n: np.ndarray) -> np.ndarray:
        """Flat node index of each named token."""
        return np.array([self.forest.node_of[p][t] for p, t in zip(prompt_n, token_n, strict=True)], np.int64)

    def _clean_site(self, site: str, layer: int, group: Group, calls: RecordedCalls) -> torch.Tensor:
        anatomy, hidden = self.anatomy, self._residual(layer, group)
        if site == "head":
            with caught_input(anatomy.output_projection(layer)) as caught:
                calls.attention[layer](anatomy.attention(layer), anatomy.attention_norm(layer)(hidden))
        else:
            with caught_output(anatomy.mlp(layer)) as caught:
                calls.layer[layer](anatomy.layers[layer], hidden)
        assert len(caught) == 1, f"the {site} hook of layer {layer} fired {len(caught)} times, not once"
        return caught[0]

    def baseline(self) -> Scores:
        """Scores (1 x A) of the unedited model: a no-op edit of the last layer, in the batch shape of real edits."""
        if self._baseline is None:
            self._baseline = self._no_op(self.anatomy.shape.n_layers - 1, self.groups)
        return self._baseline

    def _no_op(self, layer: int, groups: Sequence[Group]) -> Scores:
        edits = [Edit.heads_of(layer, ())] * self._copies(1)
        return self._run(layer, edits, Replacement.zero(self.anatomy, "head", layer), groups).first()

    # ---- edits ----

    def run_edits(self, layer: int, edits: Sequence[Edit], replacement: Replacement) -> Scores:
        """Scores under each edit of ``layer`` by itself: E x A.

        Args:
            edits: heads of this layer (one batch row each) or its MLP.
            replacement: what the edited activations become, and at which tokens.
        Raises:
            FloatingPointError: an edit gave NaN or infinity (names layer, head and prompt).
        """
        result = self._run(layer, edits, replacement, self.groups)
        try:
            check_finite(result, edits, self.answers, self.prompts)
        except FloatingPointError:  # NaN spreads over a pack: full passes name the prompt it came from
            PlainEngine(self.anatomy, self.prompts).run_edits(layer, edits, replacement)
            raise
        return result

    def _run(self, layer: int, edits: Sequence[Edit], replacement: Replacement, groups: Sequence[Group]) -> Scores:
        board = ScoreBoard(len(edits), len(self.answers), self.anatomy)
        nodes = None
        if replacement.prompt_n is not None and replacement.token_n is not None:
            nodes = self._nodes(replacement.prompt_n, replacement.token_n)
        values = PlacedReplacement.place(replacement, self.forest.n_packs, self.forest.pack_size, nodes)
        for group, calls in zip(groups, self.calls, strict=False):
            self._run_group(board, layer, edits, values, group, calls)
        return board.scores(self.answers.gold_A)

    def _run_group(
        self,
        board: ScoreBoard,
        layer: int,
        edits: Sequence[Edit],
        values: PlacedReplacement,
        group: Group,
        calls: RecordedCalls,
    ) -> None:
        at_once = max(1, self.max_tokens // (len(group.packs) * self.forest.pack_size))
        start = 0
        while start < len(edits):
            stop = min(start + at_once, len(edits))
            try:
                hidden = self._replay(layer, edits[start:stop], values, group, calls)
                self._score_group(board, start, stop - start, group, hidden)
                start = stop
            except torch.cuda.OutOfMemoryError:
                if stop - start == 1:
                    raise
                at_once = max(1, (stop - start) // 2)
                self.max_tokens = at_once * len(group.packs) * self.forest.pack_size
                torch.cuda.empty_cache()

    @torch.inference_mode()
    def _replay(
        self, layer: int, edits: Sequence[Edit], values: PlacedReplacement, group: Group, recorded: RecordedCalls
    ) -> torch.Tensor:
        """Layers ``layer``.. under ``edits``: (P * E) M D at the group's answer slots, a pack's edits adjoining."""
        last = self.anatomy.shape.n_layers - 1
        calls = recorded.repeated(len(edits))
        hidden = self._residual(layer, group)
        attention, mlp = self._edited_outputs(layer, edits, values, group, recorded)
        hidden = hidden.repeat_interleave(len(edits), dim=0)
        if layer == last:
            nodes = self._slots(group, len(edits))
            hidden, attention = _gather(hidden, nodes), _gather(attention, nodes)
            mlp = None if mlp is None else _gather(mlp, nodes)
        hidden = self._layer_with(layer, hidden, calls.layer[layer], attention, mlp)
        if layer == last:
            return hidden
        for later in range(layer + 1, last):
            hidden = self._layer(later, hidden, calls.layer[later])
        return self._last_layer(hidden, calls, group, len(edits))

    def _edited_outputs(
        self, layer: int, edits: Sequence[Edit], values: PlacedReplacement, group: Group, calls: RecordedCalls
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Attention output (P * E) N D of the edited layer and, for an MLP edit, its MLP output."""
        anatomy = self.anatomy
        heads_PNZ = self._clean_site("head", layer, group, calls)
        if edits[0].site == "mlp":
            mlp_PND = self._clean_site("mlp", layer, group, calls)
            edited = values.apply(mlp_PND, group.span)
            return anatomy.output_projection(layer)(heads_PNZ), edited
        weight = anatomy.output_weight(layer)
        output_PEND = anatomy.output_projection(layer)(heads_PNZ)[:, None].repeat(1, len(edits), 1, 1)
        for row, edit in enumerate(edits):  # o_proj is linear: only the edited slices' share of its output changes
            for head in edit.heads:
                columns = anatomy.head_slice(head)
                clean = heads_PNZ[..., columns]
                output_PEND[:, row] += (values.apply(clean, group.span, columns) - clean) @ weight[columns]
        return output_PEND.flatten(0, 1), None

    def _layer_with(
        self, layer: int, hidden: torch.Tensor, call: Call, attention: torch.Tensor, mlp: torch.Tensor | None
    ) -> torch.Tensor:
        module, family = self.anatomy.layers[layer], self.anatomy.family
        with standing_in(module, family.attention, attention, as_tuple=True):
            if mlp is None:
                return call(module, hidden)
            with standing_in(module, family.mlp, mlp):
                return call(module, hidden)

    def _last_layer(self, hidden: torch.Tensor, calls: RecordedCalls, group: Group, edits: int = 1) -> torch.Tensor:
        """The last layer at answer slots only: attention reads all nodes, the rest runs on M of them."""
        last, anatomy = self.anatomy.shape.n_layers - 1, self.anatomy
        attention = calls.attention[last](anatomy.attention(last), anatomy.attention_norm(last)(hidden))
        nodes = self._slots(group, edits)
        return self._layer_with(last, _gather(hidden, nodes), calls.layer[last], _gather(attention, nodes), None)

    def _slots(self, group: Group, edits: int) -> torch.Tensor:
        return group.slots_PM.repeat_interleave(edits, dim=0)

    def _score_group(self, board: ScoreBoard, start: int, edits: int, group: Group, hidden_RMD: torch.Tensor) -> None:
        per_pack = hidden_RMD.unflatten(0, (-1, edits))
        picked = per_pack[group.answer_rows, :, group.answer_slots].transpose(0, 1)  # E A' D
        board.fill(start, group.answers, score(self.anatomy, picked, group.gold))

    # ---- noise ----

    def noise_floor(self, baseline: Scores) -> dict[str, float]:
        """How far a no-op edit of the first, middle and last layer strays from the baseline: nats and flips.

        Measured on the answers of the first group of packs.
        """
        last = self.anatomy.shape.n_layers - 1
        group = self.groups[0]
        answers = group.answers.cpu().numpy()
        expected = baseline.at(answers)
        logprob, logit, flips = 0.0, 0.0, 0
        for layer in sorted({0, (last + 1) // 2, last}):
            found = self._no_op(layer, [group]).at(answers)
            logprob = max(logprob, float(np.abs(found.logprob_EA - expected.logprob_EA).max()))
            logit = max(logit, float(np.abs(found.logit_EA - expected.logit_EA).max()))
            flips = max(flips, int((found.predicted_EA != expected.predicted_EA).sum()))
        return {
            "max_logprob_deviation": logprob,
            "max_logit_deviation": logit,
            "flipped_predictions": flips,
            "answers": len(answers),
        }


def best_pack_size(
    anatomy: Anatomy, sequences: Sequence[Sequence[int]], private_from: Sequence[int] | None, *, on_gpu: bool
) -> int:
    """The pack size with the least work: large packs pay for dense masks, small ones repeat shared prefixes.

    Work per node is taken as 1 + a * N with a = 4 D' / (2 * weights of a layer); masked attention runs at about
    a third of the matrix products' speed on a GPU.
    """
    shape = anatomy.shape
    weights = sum(p.numel() for p in anatomy.layers[0].parameters())
    per_node = 4 * shape.n_heads * shape.d_head / (2 * weights) * (3 if on_gpu else 1)
    longest = max(len(s) for s in sequences)
    sizes = GPU_PACK_SIZES if on_gpu else CPU_PACK_SIZES
    candidates = [n for n in sizes if n >= longest] or [longest]

    def work(size: int) -> float:
        forest = plant(sequences, pack_size=size, private_from=private_from)
        return forest.n_packs * forest.pack_size * (1 + per_node * forest.pack_size)

    enough = count_nodes(sequences)
    small = [n for n in candidates if n <= enough] or candidates[:1]
    return min(small, key=work)


def _group(forest: Forest, answers: Answers, packs_together: int, device: torch.device) -> list[Group]:
    node_A = np.array([forest.node_of[p][r] for p, r in zip(answers.prompt_A, answers.row_A, strict=True)])
    pack_A, within_A = node_A // forest.pack_size, node_A % forest.pack_size
    groups = []
    for start in range(0, forest.n_packs, packs_together):
        packs = np.arange(start, min(start + packs_together, forest.n_packs))
        chosen = np.flatnonzero(np.isin(pack_A, packs))
        wanted = [np.unique(within_A[chosen][pack_A[chosen] == pack]) for pack in packs]
        slots = np.zeros((len(packs), max(len(nodes) for nodes in wanted)), np.int64)
        for row, nodes in enumerate(wanted):
            slots[row, : len(nodes)] = nodes
        rows = pack_A[chosen] - start
        columns = np.array([np.searchsorted(wanted[r], n) for r, n in zip(rows, within_A[chosen], strict=True)])
        tensors = [torch.from_numpy(a).to(device) for a in (chosen, answers.gold_A[chosen], rows, columns, slots)]
        groups.append(Group(packs, *tensors))
    return groups


def _gather(values_RND: torch.Tensor, nodes_RM: torch.Tensor) -> torch.Tensor:
    return values_RND.gather(1, nodes_RM[..., None].expand(-1, -1, values_RND.shape[-1]))
