"""Look inside a translator: cross-attention as an alignment, the strongest head, and the logit lens."""

import clearhead


def main() -> None:
    model = clearhead.load("zh-en")
    inspection = model.inspect("我爱你。", top=3)
    source, target, lens = inspection.source, inspection.target, inspection.lens
    assert source is not None
    assert target is not None
    assert lens is not None
    print(inspection)

    print("\nCross-attention of the last layer, mean over heads; rows are what the decoder reads:")
    weights = inspection.cross[-1].weights.mean(0)  # (T, S)
    print(" " * 10 + "".join(f"{text:>8}" for text in source.texts))
    for text, row in zip(target.texts, weights.tolist(), strict=True):
        print(f"{text:>10}" + "".join(f"{weight:8.2f}" for weight in row))

    print("\nHow much each head of the last layer adds to the residual stream (norm of its updates):")
    norms = inspection.cross[-1].updates.norm(dim=-1).mean(-1)  # (H,)
    print("  ".join(f"head {head}: {norm:.2f}" for head, norm in enumerate(norms.tolist())))

    print("\nLogit lens: the next token after each layer, most likely first:")
    for layer, positions in enumerate(lens.texts, start=1):
        for text, candidates in zip(target.texts, positions, strict=True):
            print(f"  layer {layer}, after {text!r}: {', '.join(map(repr, candidates))}")


if __name__ == "__main__":
    main()
