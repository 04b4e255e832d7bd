"""The functions of an exported graph that torch's exporter does not write: attention, and what passes read of the tokens.

They are in ONNX (`onnxscript`), in the names and with the states of `hf_rfa.export.graph`. ``FIRST`` stands for its
`FIRST_ARRIVAL` and ``SINK`` for its `SINK_SCORE`.
"""

from __future__ import annotations

from onnxscript import opset21 as op
from onnxscript import script
from onnxscript.values import Opset

from .graph import DOMAIN, UNSEEN
from .graph import FIRST_ARRIVAL as FIRST
from .graph import SINK_SCORE as SINK

OWN = Opset(DOMAIN, 1)
contrib = Opset("com.microsoft", 1)


@script(OWN)
def rows_of(rows, index):
    """Return rows [B, H, P, n] of tokens [B, H, N, n] by their index [B, H, P]."""
    shape = op.Shape(rows)
    batch, heads, count, width = op.Split(shape, num_outputs=4)
    flat = op.Reshape(rows, op.Concat([-1], width, axis=0))
    texts = op.Range(0, op.Squeeze(batch * heads), 1)
    first = op.Reshape(texts * count, op.Concat(batch, heads, [1], axis=0))
    return op.Gather(flat, index + first, axis=0)


@script(OWN)
def turned(rows, by, frequency, partner):
    """Return rows [B, H, P, n] whose first d columns, keys, are some positions further, ``by`` [B, H, P]."""
    width = op.Shape(frequency)
    key, others = op.Split(rows, op.Concat(width, op.Shape(rows, start=3) - width, axis=0), axis=3)
    angle = op.Unsqueeze(by, [3]) * frequency
    key = key * op.Cos(angle) + op.MatMul(key, partner) * op.Sin(angle)
    return op.Concat(key, others, axis=3)


@script(OWN)
def moved(rows, score, arrival, taken_off, recency, frequency, partner, sinks: float):
    """Return rows, scores and arrivals of a memory where an epoch has them (`hf_rfa.models.positions`)."""
    off = op.Unsqueeze(taken_off, [2])
    after = op.Where(arrival > 0.0, op.Max(arrival - off, 1.0), arrival)
    least = FIRST + sinks
    by = op.Max(after, least) - op.Max(arrival, least)
    by = op.Where(score >= SINK, by * 0.0, by)
    return turned(rows, by, frequency, partner), score - recency * off, after


@script(OWN)
def beaten(score, arrival, is_token, start, window: float, places_count):
    """Return how many tokens beat each of N for a slot at every new token: [B, H, W, N], of those that left the window.

    Tokens are in the order of arrival, W new ones behind those of a memory: whoever came first beats an equal.
    """
    total = op.Shape(score, start=2)
    is_ranked = op.And(arrival > 0.0, score < SINK)
    ranked = op.Where(is_ranked, score, -SINK)
    _best, order = op.TopK(ranked, total, axis=2, largest=1, sorted=1)
    every = op.Range(0, op.Squeeze(total), 1)
    rank = op.ScatterElements(order, order, op.Expand(every, op.Shape(order)), axis=2)
    # Those that had left the window before, by their order.
    before = op.Cast(op.And(is_ranked, arrival < start - window), to=1)
    better = op.CumSum(op.GatherElements(before, order, axis=2), 2, exclusive=1)
    better = op.GatherElements(better, rank, axis=2)
    # The one that leaves the window with each new token.
    width = op.Shape(is_token, start=1)
    columns = op.Range(0, op.Squeeze(width), 1)
    padding = width - op.ReduceSum(op.Cast(is_token, to=7), [1], keepdims=1)
    behind = columns - padding
    size = op.Cast(window, to=7)
    leaving = op.Where(behind < size, behind, columns) + places_count - size
    index = op.Expand(op.Unsqueeze(leaving, [1]), op.Concat(op.Shape(score, end=2), width, axis=0))
    last = op.CastLike(1073741824, rank)
    rank_or_last = op.Where(is_ranked, rank, last)
    theirs = op.GatherElements(rank_or_last, index, axis=2)
    theirs = op.Where(op.Unsqueeze(behind >= 0, [1]), theirs, last)
    beats = op.Unsqueeze(theirs, [3]) < op.Unsqueeze(rank, [2])
    beats = op.CumSum(op.Cast(beats, to=1), 2)
    return beats + op.Unsqueeze(better, [2])


@script(OWN)
def read_summary(sums, linear, count_weight):
    """Return what queries make of a summary (`hf_rfa.models.summary_feature_map`).

    Args:
        sums: n and n x, [B, H, W, F].
        linear: of mass, tilt and slope, [B, H, G, W, 2F - 1].
        count_weight: what of these grows with log n, [H, G, 1, 2F - 1].

    Returns:
        The logarithm of the mass, [B, H, G, W, 1], and what the state's rows weigh in the output, [B, H, G, W, F].
    """
    rank = op.Shape(sums, start=3) - 1
    count, totals = op.Split(op.Unsqueeze(sums, [2]), op.Concat([1], rank, axis=0), axis=4)
    count = op.Max(count, 1e-20)
    log_count, mean = op.Log(count), totals / count
    grown = linear + op.Max(log_count, 0.0) * count_weight
    mass, tilt, slope = op.Split(grown, op.Concat([1], rank, rank, axis=0), axis=4)
    log_mass = mass + op.ReduceSum(slope * mean, [4], keepdims=1) + log_count
    weights = op.Concat(1.0 - op.ReduceSum(tilt * mean, [4], keepdims=1), tilt, axis=4)
    return log_mass, weights / count


@script(OWN)
def leaving(whole, is_gone):
    """Return the row that leaves with every new token, [B, H, W, n], and its features, zeros where none does.

    Args:
        whole: rows of tokens, [B, H, N, n].
        is_gone: whether each new token sees each of them no more, [B, H, W, N]; False for padding.
    """
    width, total = op.Shape(is_gone, start=2, end=3), op.Shape(is_gone, start=3)
    left_with = width - op.ReduceSum(op.Cast(is_gone, to=7), [2], keepdims=0)  # [B, H, N], W where none leaves
    none = op.Expand(-1, op.Concat(op.Shape(is_gone, end=2), width + 1, axis=0))
    number = op.Expand(op.Range(0, op.Squeeze(total), 1), op.Shape(left_with))
    index = op.Slice(op.ScatterElements(none, left_with, number, axis=2), [0], width, [2])
    return rows_of(whole, op.Max(index, 0)), op.Cast(op.Unsqueeze(index >= 0, [3]), to=1)


@script(OWN)
def attend(
    query, rows, places, is_token, taken_off, is_step, place, leaves, unseen, past_rows, past_places,
    recency, frequency, partner, decay, linear, count_weight,
    window: float, sinks: float, slots: float, features: int,
):  # fmt: skip
    """Attend to a memory of fixed size, which takes the new tokens in: one of them in its place, or several.

    The law is that of `hf_rfa.models.lifetimes`.
    """
    head_dim = op.Shape(query, start=3)
    of_features = head_dim * 2
    count = op.Shape(past_places, start=2)
    end = [9223372036854775807]
    if is_step:
        index = op.Expand(op.Unsqueeze(place, [3]), op.Shape(rows))
        padding = op.Concat([0, 0, 0, 0, 0, 0, 0], op.Shape(rows, start=3) - head_dim, axis=0)
        wide = op.Pad(query, padding)
        if features > 0:
            left = op.GatherElements(past_rows, index, axis=2)
            state = op.Slice(past_rows, count, end, [2])
            fading = op.Slice(decay, [0], [1], [3])
            joining = op.Transpose(op.Slice(left, of_features, end, [3]) * leaves, perm=[0, 1, 3, 2])
            state = state * fading + op.MatMul(joining, left)
            sums = op.Slice(op.Slice(state, [0], [1], [2]), of_features, end, [3])
            log_mass, reading = read_summary(sums, linear, count_weight)
            below = op.Range(0, features, 1) + count
            below = op.Expand(op.Reshape(below, [1, 1, -1, 1]), op.Shape(state))
            both, new = op.Concat(index, below, axis=2), op.Concat(rows, state, axis=2)
            new_rows_s = op.ScatterElements(past_rows, both, new, axis=2)
            seen_logits = op.Slice(op.MatMul(wide, op.Transpose(new_rows_s, perm=[0, 1, 3, 2])), [0], count, [3])
            logits = op.Concat(seen_logits + unseen, op.Squeeze(log_mass, [3]), axis=3)
            weights, share = op.Split(op.Softmax(logits, axis=-1), op.Concat(count, [1], axis=0), axis=3)
            weights_s = op.Concat(weights, share * op.Squeeze(reading, [3]), axis=3)
        else:
            new_rows_s = op.ScatterElements(past_rows, index, rows, axis=2)
            logits = op.MatMul(wide, op.Transpose(new_rows_s, perm=[0, 1, 3, 2])) + unseen
            weights_s = op.Softmax(logits, axis=-1)
        new_rows = op.Identity(new_rows_s)
        new_places = op.ScatterElements(past_places, op.Concat(place, place, axis=1), places, axis=2)
        output = op.Slice(op.MatMul(weights_s, new_rows), head_dim, of_features, [3])
    else:
        score, arrival = op.Split(past_places, axis=1, num_outputs=2)
        score_new, arrival_new = op.Split(places, axis=1, num_outputs=2)
        arrival, order = op.TopK(arrival, count, axis=2, largest=0, sorted=1)  # empty places first
        score = op.GatherElements(score, order, axis=2)
        before = rows_of(past_rows, order)
        if op.ReduceMax(taken_off, keepdims=0) > 0.0:
            before_m, score_m, arrival_m = moved(before, score, arrival, taken_off, recency, frequency, partner, sinks)
        else:
            before_m, score_m, arrival_m = op.Identity(before), op.Identity(score), op.Identity(arrival)
        mask = op.Unsqueeze(is_token, [1])
        now = op.Slice(arrival_new, [0], [1], [1])  # [B, 1, W]
        whole = op.Concat(before_m, rows, axis=2)
        all_score = op.Concat(score_m, score_new, axis=2)
        all_arrival = op.Concat(arrival_m, op.Where(mask, arrival_new, 0.0), axis=2)
        is_sink = op.Unsqueeze(all_score >= SINK, [2])
        theirs = op.Unsqueeze(all_arrival, [2])
        ours = op.Unsqueeze(now, [3])
        stays = op.Or(theirs > ours - window, is_sink)
        if slots > 0.0:
            first = op.Slice(now, [0], [1], [2])
            is_first = op.Slice(mask, [0], [1], [2])
            start = op.Where(is_first, first, first + 1.0)
            among = beaten(all_score, all_arrival, is_token, start, window, count) < slots
            seen = op.Or(stays, among)
        else:
            seen = op.Identity(stays)
        is_query = op.Unsqueeze(mask, [3])
        is_there = op.And(theirs > 0.0, theirs <= ours)
        visible = op.And(is_there, seen)  # [B, H, W, N]
        may_see = op.Or(visible, op.Not(is_query))  # padding sees all
        offset = op.Where(may_see, 0.0, UNSEEN)
        keys = op.Slice(whole, [0], head_dim, [3])
        values = op.Slice(whole, head_dim, of_features, [3])
        logits = op.MatMul(query, op.Transpose(keys, perm=[0, 1, 3, 2]))
        width, total = op.Shape(is_token, start=1), op.Shape(all_score, start=2)
        by_group = op.Concat(op.Shape(query, end=2), [-1], width, total, axis=0)
        by_row = op.Concat(op.Shape(query, end=3), [-1], axis=0)
        logits = op.Reshape(logits, by_group) + op.Unsqueeze(offset, [2])
        # What the last token sees stays.
        remains = op.Squeeze(op.Slice(visible, [-1], end, [2]), [2])
        number = op.Range(0, op.Squeeze(total), 1)
        _first, chosen = op.TopK(op.Where(remains, number - total, number), count, axis=2, largest=0, sorted=1)
        kept = rows_of(whole, chosen)
        if features > 0:
            state = op.Slice(past_rows, count, end, [2])
            is_gone = op.And(op.And(is_there, op.Not(seen)), is_query)
            left, leaves_any = leaving(whole, is_gone)
            joining = op.Slice(left, of_features, end, [3]) * leaves_any
            joined = op.Transpose(joining, perm=[0, 1, 3, 2])
            fading, lasting = op.Split(decay, op.Concat([1], width, axis=0), axis=3)
            sums = op.Slice(op.Slice(state, [0], [1], [2]), of_features, end, [3]) * fading + op.MatMul(
                lasting, joining
            )
            log_mass, reading = read_summary(sums, linear, count_weight)
            shares = op.MatMul(reading, op.Unsqueeze(joined, [2])) * op.Unsqueeze(lasting, [2])
            shares = op.Reshape(op.Concat(reading * op.Unsqueeze(fading, [2]), shares, axis=4), by_row)
            gone = op.Slice(op.Concat(state, left, axis=2), head_dim, of_features, [3])
            weights = op.Reshape(op.Softmax(op.Concat(logits, log_mass, axis=4), axis=-1), by_row)
            no_value = op.Slice(values, [0], [1], [2]) * 0.0
            exact = op.MatMul(weights, op.Concat(values, no_value, axis=2))
            output_s = exact + op.Slice(weights, total, end, [3]) * op.MatMul(shares, gone)
            faded, lasted = op.Split(op.Slice(decay, [-1], end, [2]), op.Concat([1], width, axis=0), axis=3)
            new_state = state * faded + op.MatMul(joined * lasted, left)
            new_rows_p = op.Concat(kept, new_state, axis=2)
        else:
            output_s = op.MatMul(op.Reshape(op.Softmax(logits, axis=-1), by_row), values)
            new_rows_p = op.Identity(kept)
        output, new_rows = op.Identity(output_s), op.Identity(new_rows_p)
        kept_score = op.GatherElements(op.Where(remains, all_score, 0.0), chosen, axis=2)
        kept_arrival = op.GatherElements(op.Where(remains, all_arrival, 0.0), chosen, axis=2)
        new_places = op.Concat(kept_score, kept_arrival, axis=1)
    return output, new_rows, new_places


@script(OWN)
def passes(input_ids, attention_mask, places, distance: float, step: float, size: float, vocabulary: int):
    """Return in which pass every token is read [B, T], -1 for padding; the passes' numbers; and logits of zeros.

    A pass takes at most ``size`` tokens of a text, and none of two epochs (`hf_rfa.models.positions`).
    """
    length = op.Shape(input_ids, start=1)
    mask = op.Slice(attention_mask, op.Neg(length), [9223372036854775807], [1])
    is_token = op.Cast(mask, to=9)
    number = op.Cast(op.CumSum(op.Cast(is_token, to=7), 1) - 1, to=1)
    if distance > 0.0:
        _score, arrival = op.Split(places, axis=1, num_outputs=2)
        last = op.Unsqueeze(op.ReduceMax(arrival, [1, 2], keepdims=0), [1])
        count = op.Where(last > 0.0, last + 1.0 - FIRST, 0.0)
        left = op.Max(distance - count, 0.0)
        behind = number - left
        epoch = op.Floor(behind / step)
        is_here = behind < 0.0
        began = op.Where(is_here, 0.0, left + epoch * step)
        before = op.Where(is_here, 0.0, op.Ceil(left / size) + epoch * op.Ceil(step / size))
        which = before + op.Floor((number - began) / size)
    else:
        which = op.Floor(number / size)
    pass_of = op.Cast(op.Where(is_token, which, -1.0), to=7)
    most = op.Max(op.ReduceMax(pass_of, keepdims=0), 0) + 1
    every = op.Range(0, most, 1)
    shape = op.Concat(op.Shape(input_ids, end=1), [1], op.Reshape(vocabulary, [1]), axis=0)
    return pass_of, every, op.Expand(0.0, shape)


@script(OWN)
def tokens_of(number, input_ids, pass_of):
    """Return the tokens of a pass, ids and whether they are none, with padding before those of shorter rows."""
    is_chosen = pass_of == number
    chosen = op.Cast(is_chosen, to=7)
    count = op.ReduceSum(chosen, [1], keepdims=1)
    width = op.Max(op.ReduceMax(count, keepdims=0), 1)
    column = op.Where(is_chosen, op.CumSum(chosen, 1) - 1 + width - count, width)
    wider = op.Concat(op.Shape(input_ids, end=1), op.Reshape(width + 1, [1]), axis=0)
    laid = op.ScatterElements(op.Expand(0, wider), column, input_ids, axis=1)
    ids = op.Slice(laid, [0], op.Reshape(width, [1]), [1])
    columns = op.Range(0, width, 1)
    return ids, columns >= width - count


@script(OWN)
def last_logits(logits, before, is_token):
    """Return the logits of rows that had a token in a pass, and those from before of the others."""
    last = op.Slice(is_token, [-1], [2147483647], [1])
    return op.Where(op.Unsqueeze(last, [2]), logits, before)


@script(OWN)
def linear_int8(x, weight, scale):
    """Return x times a matrix of 8 bits [K, N], whose columns have a scale each; every token of x gets a scale of its own.

    Both are stored around 128: products of such numbers fit into what every processor adds them up in.
    """
    largest = op.Max(op.ReduceMax(op.Abs(x), [-1], keepdims=1), 1e-30)
    middle = op.Cast(128, to=2)
    rounded = op.QuantizeLinear(x / largest, 1.0 / 127.0, middle)
    return contrib.MatMulIntegerToFloat(rounded, weight, 1.0 / 127.0, scale, middle, middle) * largest


@script(OWN)
def embedding_int8(table, scale, ids, width: int):
    """Return the rows of a table of 8 bits [V, blocks, block], whose blocks have a scale each."""
    rows = op.Cast(op.Gather(table, ids, axis=0), to=1) - 128.0
    rows = rows * op.Unsqueeze(op.Gather(scale, ids, axis=0), [-1])
    return op.Slice(op.Reshape(rows, op.Concat(op.Shape(ids), [-1], axis=0)), [0], op.Reshape(width, [1]), [2])
