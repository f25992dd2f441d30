"""Answers made by hand, with the numbers of real models: what pages are tested with."""

from oversmooth.results.answer import Answer, CurvePoint, LayerChange, PartChange, Told

BINS = 40


def spread(mean, width):
    """Quantiles and a histogram of pairs around a mean."""
    quantiles = tuple(max(-1.0, min(1.0, mean + width * k)) for k in (-0.9, -0.45, -0.05, 0.4, 1.1))
    counts = [max(0.0, 1 - abs(-1 + 2 * (k + 0.5) / BINS - mean) / (1.3 * width)) for k in range(BINS)]
    return quantiles, tuple(count / sum(counts) for count in counts)


def answer_of(means, parts, *, has_norm=False, stack="", model="all-MiniLM-L6-v2", untrained=0.37, width=0.2, **words):
    """Means at the input, after every layer, and after the final norm; parts share each change evenly."""
    layers = len(means) - 1 - has_norm
    labels = ["input", *map(str, range(layers)), *(["final norm"] if has_norm else [])]
    points = tuple(
        CurvePoint(
            label=label,
            mean=mean,
            quantiles=spread(mean, width)[0],
            histogram=spread(mean, width)[1],
            share_above=0.01,
            untrained=untrained,
        )
        for label, mean in zip(labels, means, strict=True)
    )
    own = {name: change for name, change in parts.items() if name != "final norm"}
    changes = []
    for k, label in enumerate(labels[1:]):
        step = means[k + 1] - means[k]
        names = ["final norm"] if label == "final norm" else list(own)
        rest = {name: own.get(name, 0.0) / layers for name in names[:-1]}
        found = {**rest, names[-1]: step - sum(rest.values())}
        changes.append(LayerChange(label=label, change=step, parts=tuple(found.items())))
    sums = {name: sum(dict(layer.parts).get(name, 0.0) for layer in changes) for name in parts}
    told = {
        "headline": "Tokens stay distinct: this model does not oversmooth.",
        "deck": "Of each token, about a third (0.33) is shared with the other tokens of its text at the output; at the input "
        "about a tenth (0.07). An untrained copy goes from 0.34 to 0.37.",
        "where": Told(title="All six layers", text="+0.04 each on average; most in layer 0 (+0.07 of +0.25)."),
        "who": Told(
            title="Attention and its norm draw together; feed-forward and its norm push apart.",
            text="+0.77 towards each other, -0.52 away; +0.25 in all.",
        ),
        "sure": Told(title="0.33, 95% interval 0.29 to 0.37", text="20 texts; all of it is distinct."),
        "now": Told(
            title="Nothing to mend. Keep it so in CI:", command="oversmooth gate all-MiniLM-L6-v2 --max-cosine 0.45"
        ),
    }
    output = means[-1]
    return Answer(
        model=model,
        stack=stack,
        subject=words.pop("subject", f"{layers} layers, 20 built-in texts, 1,556 tokens"),
        state="distinct" if output < 0.5 else "crowded" if output < 0.9 else "collapsed",
        is_sure=True,
        input=means[0],
        output=output,
        before_norm=means[-2] if has_norm else None,
        interval=words.pop("interval", (output - 0.04, output + 0.04)),
        values=tuple(output + 0.01 * k for k in range(-3, 4)),
        shape="steady",
        points=points,
        layers=tuple(changes),
        parts=tuple(
            PartChange(part=name, change=change, interval=(change - 0.02, change + 0.02))
            for name, change in sums.items()
        ),
        rank=(56.0, 47.0, 77),
        between=(between := words.pop("between", (0.01, 0.06))),
        between_values=tuple(between[1] + 0.01 * k for k in range(-3, 4)),
        limit=0.45,
        **{**told, **words},
    )


def minilm(**more):
    parts = {
        "attention": 0.37,
        "norm after attention": 0.40,
        "feed-forward": -0.14,
        "norm after feed-forward": -0.38,
    }
    return answer_of((0.07, 0.144, 0.168, 0.201, 0.238, 0.290, 0.329), parts, **more)


def deep(layers=80, **more):
    """A random model that collapses at once."""
    means = [0.01 + 0.96 * (1 - 0.8**k) for k in range(layers + 1)]
    parts = {"attention": 0.97, "feed-forward": -0.01, "final norm": 0.0}
    words = {
        "model": "deep80",
        "headline": f"On random token ids this model oversmooths: after {layers} layers all tokens are nearly the same.",
        "subject": f"{layers} layers, 2 sequences of random token ids (no tokenizer beside the model), 64 tokens",
        "interval": None,
        "where": Told(title="Layers 0 to 5", text="They make +0.66 of +0.96. The other 74 add +0.30 together."),
    }
    return answer_of((*means, 0.97), parts, has_norm=True, untrained=0.95, **{**words, **more})
