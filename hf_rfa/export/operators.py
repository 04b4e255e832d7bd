"""The functions of an exported graph that torch's exporter does not write: attention, and what passes read of the tokens.

They are in ONNX (`onnxscript`), in the names and with the states of `hf_rfa.export.graph`. ``FIRST`` stands for its
`FIRST_ARRIVAL` and ``SINK`` for its `SINK_SCORE`. A step is a pass of one token of every text, in no new epoch.
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
#: Above all scores, and with a minus below them.
ABOVE = 3.3e38


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
def unturned(key, by, frequency):
    """Return keys [B, H, n, d] as `hf_rfa.export.onnx_model` multiplies them without their positions, ``by`` [B, H, n]."""
    angle = op.Unsqueeze(by, [3]) * frequency
    return op.Concat(key * op.Cos(angle), key * op.Sin(angle), axis=3)


@script(OWN)
def moved(key, score, arrival, taken_off, recency, frequency, partner, sinks: float):
    """Return keys, scores and arrivals of a memory where an epoch has them (`hf_rfa.models.positions`)."""
    off = op.Unsqueeze(taken_off, [2])
    after = op.Where(arrival > 0.0, op.Max(arrival - off, 1.0), arrival)
    least = FIRST + sinks
    by = op.Max(after, least) - op.Max(arrival, least)
    angle = op.Unsqueeze(op.Where(score >= SINK, by * 0.0, by), [3]) * frequency
    turned = key * op.Cos(angle) + op.MatMul(key, partner) * op.Sin(angle)
    return turned, score - recency * off, after


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
def positions_of(is_token, places, distance: float, step: float, sinks: float):
    """Return what all layers read of a pass, from the first stack's places.

    Returns:
        Positions [B, W]; arrivals and whether tokens are sinks, [B, W]; what is taken off the arrivals of a memory, and the
        arrival of the last token before, [B, 1]; and whether the pass is a step, [].
    """
    score, arrival = op.Split(places, axis=1, num_outputs=2)
    last = op.ReduceMax(arrival, [1, 2, 3], keepdims=0)
    last = op.Unsqueeze(last, [1])
    count = op.Where(last > 0.0, last + (1.0 - FIRST), 0.0)
    first_head = op.Squeeze(op.Slice(score, [0], [1], [2]), [1, 2])
    before = op.ReduceSum(op.Cast(first_head >= SINK, to=1), [1], keepdims=1)
    whole = op.Cast(is_token, to=1)
    number = op.CumSum(whole, 1) - 1.0
    taken_off = count * 0.0
    if distance > 0.0:
        ends = op.Slice(whole, [-1], [9223372036854775807], [1])
        taken_off_m = op.Where(count >= distance, step * ends, 0.0)
    else:
        taken_off_m = op.Identity(taken_off)
    ordinal = count - taken_off_m + number
    is_one = op.Squeeze(op.Shape(is_token, start=1)) == 1
    are_all = op.ReduceMin(whole, keepdims=0) > 0.0
    none_moves = op.ReduceMax(taken_off_m, keepdims=0) == 0.0
    is_step = op.And(is_one, op.And(are_all, none_moves))
    return op.Cast(op.Max(ordinal, 0.0), to=7), ordinal + FIRST, before + number < sinks, taken_off_m, last, is_step


@script(OWN)
def turns_of(arrival, frequency):
    """Return cosines and sines of the angles of every column at the positions of a pass, [B, 1, W, 2d]."""
    angle = op.Unsqueeze(arrival - FIRST, [1, 3]) * frequency
    return op.Concat(op.Cos(angle), op.Sin(angle), axis=3)


@script(OWN)
def decay_of(is_token, horizon: float):
    """Return what is left, at every token, of a summary and of what left with each token, [B, 1, W, 1 + W]."""
    count = op.CumSum(op.Cast(is_token, to=1), 1)
    since = op.Concat(op.Slice(count, [0], [1], [1]) * 0.0, count, axis=1)
    age = op.Unsqueeze(count, [2]) - op.Unsqueeze(since, [1])
    return op.Unsqueeze(op.Where(age >= 0.0, op.Exp(age / (0.0 - horizon)), 0.0), [1])


@script(OWN)
def target_of(places, last, head, window: float):
    """Return where the next token of a stack's heads goes (`hf_rfa.models.lifetimes.targets_of`).

    Args:
        places: [B, 2, H', P].
        last: the arrival of the last token, [B, 1].
        head: the number of each head in its layer, [H', 1].
        window: N.

    Returns:
        The place [B, H', 1]; it as an index of a layer's states, of text, head and place, [B, H', 1, 3]; the arrival of the
        token that leaves it, or 0, [B, H', 1]; and the logits' offset after that, [B, H', 1, P].
    """
    score, arrival = op.Split(places, axis=1, num_outputs=2)
    score, arrival = op.Squeeze(score, [1]), op.Squeeze(arrival, [1])
    is_in_window = arrival > op.Unsqueeze(last, [2]) + (1.0 - window)
    rank = op.Where(is_in_window, ABOVE, op.Where(arrival > 0.0, score, 0.0 - ABOVE))
    is_worst = rank == op.ReduceMin(rank, [2], keepdims=1)
    place = op.ArgMax(op.Where(is_worst, arrival, -1.0), axis=2, keepdims=1)  # of several, the last to come
    came = op.GatherElements(arrival, place, axis=2)
    unseen = op.ScatterElements(op.Where(arrival > 0.0, 0.0, UNSEEN), place, came * 0.0, axis=2)
    text = op.Reshape(op.Range(0, op.Squeeze(op.Shape(places, end=1)), 1), [-1, 1, 1])
    index = op.Concat(text + place * 0, head + place * 0, place, axis=2)
    return place, op.Unsqueeze(index, [2]), came, op.Unsqueeze(unseen, [2])


@script(OWN)
def summarize(
    summary, key, value, came, frequency, key_weight, key_bias, query_bias, count_weight,
    horizon: float, sinks: float,
):  # fmt: skip
    """Take what leaves with a step into summaries, for all heads of a stack at once.

    That are keys and values [B, H', 1, d], which came at some arrival [B, H', 1], or 0 where none leaves.

    Returns:
        The summaries after it, and a matrix and its bias, [B, H', 2F - 1, 1 + d] and [B, H', G, 1 + d], which make a query's
        mass, tilt and slope the logarithm of the summary's mass and the mean of its values (`read_summary`).
    """
    one = op.Unsqueeze(came * 0.0 + 1.0, [3])
    leaves = op.Unsqueeze(op.Cast(came > 0.0, to=1), [3])
    free = unturned(key, op.Max(came, FIRST + sinks) - FIRST, frequency)
    features = op.Concat(one, op.MatMul(free, key_weight) + key_bias, axis=3) * leaves
    joining = op.Transpose(features, perm=[0, 1, 3, 2])
    after = summary * op.Exp(-1.0 / horizon) + joining * op.Concat(value, one, axis=3)
    width, rank = op.Shape(value, start=3), op.Shape(summary, start=2, end=3) - 1
    sums, column = op.Split(after, op.Concat(width, [1], axis=0), axis=3)
    count, totals = op.Split(column, op.Concat([1], rank, axis=0), axis=2)
    count = op.Max(count, 1e-20)
    mean, log_count = totals / count, op.Log(count)
    mean_value, others = op.Split(sums / count, op.Concat([1], rank, axis=0), axis=2)
    tilt = others - mean * mean_value
    to_mass = op.Concat(one, mean * 0.0, mean, axis=2)
    to_value = op.Concat(mean_value * 0.0, tilt, tilt * 0.0, axis=2)
    matrix = op.Concat(to_mass, to_value, axis=3)
    grown = query_bias + op.Max(log_count, 0.0) * count_weight
    bias = op.MatMul(grown, matrix) + op.Concat(log_count, mean_value, axis=3)
    return after, matrix, bias


@script(OWN)
def read_summary(sums, linear, count_weight):
    """Return what queries make of a summary (`hf_rfa.models.summary_feature_map`).

    Args:
        sums: n and n x, [B, H, W, F].
        linear: of mass, tilt and slope, [B, H, G, W, 2F - 1].
        count_weight: what of these grows with log n, [H, G, 1, 2F - 1].

    Returns:
        The logarithm of the mass, [B, H, G, W, 1], and what the summary's rows weigh in the output, [B, H, G, W, F].
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
def leaving(is_gone):
    """Return the number of the token that leaves with every new one, [B, H, W], and 1 where one does, or 0, [B, H, W, 1].

    Args:
        is_gone: whether each new token sees each of all tokens no more, [B, H, W, N]; False for padding.
    """
    width, total = op.Shape(is_gone, start=2, end=3), op.Shape(is_gone, start=3)
    left_with = width - op.ReduceSum(op.Cast(is_gone, to=7), [2], keepdims=0)  # [B, H, N], W where none leaves
    none = op.Expand(-1, op.Concat(op.Shape(is_gone, end=2), width + 1, axis=0))
    number = op.Expand(op.Range(0, op.Squeeze(total), 1), op.Shape(left_with))
    index = op.Slice(op.ScatterElements(none, left_with, number, axis=2), [0], width, [2])
    return op.Max(index, 0), op.Cast(op.Unsqueeze(index >= 0, [3]), to=1)


@script(OWN)
def score_of(importance, recency, arrival, is_sink):
    """Return the scores of new tokens, [B, H, W], by importance [B, W, H] and what grows by position."""
    grown = op.Transpose(importance, perm=[0, 2, 1]) + recency * op.Unsqueeze(arrival - FIRST, [1])
    return op.Where(op.Unsqueeze(is_sink, [1]), SINK, grown)


@script(OWN)
def attend(
    query, key, value, importance, past_key, past_value, is_step, index, unseen, matrix, bias, is_token, arrival, is_sink,
    taken_off, places, summary, turns, decay, recency, frequency, partner, key_weight, key_bias, query_weight,
    query_bias, count_weight, heads: int, groups: int, head_dim: int, places_count: int, window: float, sinks: float,
    slots: float, scale: float, features: int,
):  # fmt: skip
    """Attend to a memory of fixed size, which takes the new tokens in: one of them in its place, or several.

    The law is that of `hf_rfa.models.lifetimes`. A step reads what `target_of` and `summarize` prepared, and its stack takes
    places and summaries from there. Queries are [B, H G, W, d], and importance is [B, W, H], without what grows by position.

    Returns:
        The output, [B, H G, W, d]; keys and values; and places and summary of a pass that is no step.
    """
    count, width = op.Reshape(places_count, [1]), op.Reshape(head_dim, [1])
    head_count, group_count = op.Reshape(heads, [1]), op.Reshape(groups, [1])
    rows = op.Reshape(query, op.Concat([0], head_count, [-1], width, axis=0))  # [B, H, G W, d]
    by_head = op.Concat([0], head_count, group_count, [-1], axis=0)
    if features > 0:  # noqa: SIM108 - onnxscript reads no conditional expressions
        linear_s = op.MatMul(op.Concat(query, query, axis=3) * turns, query_weight)
    else:
        linear_s = op.Identity(query)
    linear = op.Identity(linear_s)
    if is_step:
        new_key, new_value = op.ScatterND(past_key, index, key), op.ScatterND(past_value, index, value)
        logits = op.MatMul(rows, op.Transpose(new_key, perm=[0, 1, 3, 2])) * scale + unseen
        if features > 0:
            log_mass, mean_value = op.Split(
                op.MatMul(op.Reshape(linear, by_head), matrix) + bias, op.Concat([1], width, axis=0), axis=3
            )
            weights = op.Softmax(op.Concat(logits, log_mass, axis=3), axis=-1)
            exact, share = op.Split(weights, op.Concat(count, [1], axis=0), axis=3)
            output_s = op.MatMul(exact, new_value) + share * mean_value
        else:
            output_s = op.MatMul(op.Softmax(logits, axis=-1), new_value)
        output_rows = op.Identity(output_s)
        new_places, new_summary = op.Expand(0.0, [1, 1, 1, 1]), op.Expand(0.0, [1, 1, 1, 1])  # which nobody reads
    else:
        end = [9223372036854775807]
        score, past_arrival = op.Split(places, axis=1, num_outputs=2)
        score, past_arrival = op.Squeeze(score, [1]), op.Squeeze(past_arrival, [1])
        score_new = score_of(importance, recency, arrival, is_sink)
        past_arrival, order = op.TopK(past_arrival, count, axis=2, largest=0, sorted=1)  # empty places first
        score = op.GatherElements(score, order, axis=2)
        before = rows_of(past_key, order)
        if op.ReduceMax(taken_off, keepdims=0) > 0.0:
            before_m, score_m, arrival_m = moved(
                before, score, past_arrival, taken_off, recency, frequency, partner, sinks
            )
        else:
            before_m, score_m, arrival_m = op.Identity(before), op.Identity(score), op.Identity(past_arrival)
        mask, now = op.Unsqueeze(is_token, [1]), op.Unsqueeze(arrival, [1])  # [B, 1, W]
        keys = op.Concat(before_m, key, axis=2)
        values = op.Concat(rows_of(past_value, order), value, axis=2)
        all_score = op.Concat(score_m, score_new, axis=2)
        arrival_new = op.Expand(op.Where(mask, now, 0.0), op.Shape(score_new))
        all_arrival = op.Concat(arrival_m, arrival_new, axis=2)
        theirs, ours = op.Unsqueeze(all_arrival, [2]), op.Unsqueeze(now, [3])
        stays = op.Or(theirs > ours - window, op.Unsqueeze(all_score >= SINK, [2]))
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
        total = op.Shape(all_score, start=2)
        by_group = op.Concat(by_head, total, axis=0)
        by_row = op.Concat(op.Shape(rows, end=3), [-1], axis=0)
        products = op.MatMul(rows, op.Transpose(keys, perm=[0, 1, 3, 2])) * scale
        logits_p = op.Reshape(products, by_group) + op.Unsqueeze(offset, [2])
        # What the last token sees stays.
        remains = op.Squeeze(op.Slice(visible, [-1], end, [2]), [2])
        number = op.Range(0, op.Squeeze(total), 1)
        _first, chosen = op.TopK(op.Where(remains, number - total, number), count, axis=2, largest=0, sorted=1)
        new_key, new_value = rows_of(keys, chosen), rows_of(values, chosen)
        if features > 0:
            left, leaves = leaving(op.And(op.And(is_there, op.Not(seen)), is_query))
            came = op.GatherElements(all_arrival, left, axis=2)
            free = unturned(rows_of(keys, left), op.Max(came, FIRST + sinks) - FIRST, frequency)
            left_value = rows_of(values, left)
            joining = op.Concat(leaves, (op.MatMul(free, key_weight) + key_bias) * leaves, axis=3)
            joined = op.Transpose(joining, perm=[0, 1, 3, 2])
            one = op.Shape(is_token, start=1)
            fading, lasting = op.Split(decay, op.Concat([1], one, axis=0), axis=3)
            sums, column = op.Split(summary, op.Concat(width, [1], axis=0), axis=3)
            held = op.Transpose(column, perm=[0, 1, 3, 2]) * fading + op.MatMul(lasting, joining)
            linear_size = op.Concat(by_head, op.Shape(linear, start=3), axis=0)
            by_query = op.Reshape(linear, linear_size) + op.Unsqueeze(query_bias, [2])
            log_mass_p, reading = read_summary(held, by_query, op.Unsqueeze(count_weight, [2]))
            shares = op.MatMul(reading, op.Unsqueeze(joined, [2])) * op.Unsqueeze(lasting, [2])
            shares = op.Reshape(op.Concat(reading * op.Unsqueeze(fading, [2]), shares, axis=4), by_row)
            weights_p = op.Reshape(op.Softmax(op.Concat(logits_p, log_mass_p, axis=4), axis=-1), by_row)
            exact_p, share_p = op.Split(weights_p, op.Concat(total, [1], axis=0), axis=3)
            gone = op.Concat(sums, left_value, axis=2)
            output_p = op.MatMul(exact_p, values) + share_p * op.MatMul(shares, gone)
            faded, lasted = op.Split(op.Slice(decay, [-1], end, [2]), op.Concat([1], one, axis=0), axis=3)
            new_rows = op.Concat(left_value, leaves, axis=3)
            new_summary_p = summary * faded + op.MatMul(joined * lasted, new_rows)
        else:
            output_p = op.MatMul(op.Reshape(op.Softmax(logits_p, axis=-1), by_row), values)
            new_summary_p = op.Identity(summary)
        output_rows, new_summary = op.Identity(output_p), op.Identity(new_summary_p)
        kept_score = op.GatherElements(op.Where(remains, all_score, 0.0), chosen, axis=2)
        kept_arrival = op.GatherElements(op.Where(remains, all_arrival, 0.0), chosen, axis=2)
        new_places = op.Concat(op.Unsqueeze(kept_score, [1]), op.Unsqueeze(kept_arrival, [1]), axis=1)
    output = op.Reshape(output_rows, op.Concat([0], head_count * group_count, [-1], width, axis=0))
    return output, new_key, new_value, new_places, new_summary


@script(OWN)
def placed(is_step, places, place, importance, recency, arrival, is_sink, others):
    """Return the places [B, 2, H', P] of a stack after a pass: in a step with a new token, else the others."""
    if is_step:
        score = score_of(importance, recency, arrival, is_sink)
        new = op.Concat(op.Unsqueeze(score, [1]), op.Unsqueeze(score * 0.0 + op.Unsqueeze(arrival, [1]), [1]), axis=1)
        index = op.Unsqueeze(place, [1])
        after = op.ScatterElements(places, op.Concat(index, index, axis=1), new, axis=3)
    else:
        after = op.Identity(others)
    return after


@script(OWN)
def either(is_step, one, other):
    """Return one of two tensors."""
    if is_step:  # noqa: SIM108
        chosen = op.Identity(one)
    else:
        chosen = op.Identity(other)
    return chosen


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
        last = op.Unsqueeze(op.ReduceMax(arrival, [1, 2, 3], keepdims=0), [1])
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
