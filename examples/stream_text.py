"""Generate text three ways: as a stream, as several samples, and many prompts at once through the batching engine."""

import clearhead

PROMPT = "It was a dark evening in October when"


def main() -> None:
    model = clearhead.load("novels-gpt")

    print(PROMPT, end="", flush=True)
    for piece in model.stream(PROMPT, seed=3, temperature=0.8, top_p=0.9, max_new_tokens=40):
        print(piece, end="", flush=True)
    print("\n")

    best = model.generate(PROMPT, samples=3, seed=1, temperature=0.8, top_p=0.9, max_new_tokens=15)
    for number, sample in enumerate(best.candidates, start=1):
        print(f"sample {number}: {sample.text!r}, {len(sample.ids)} tokens")

    print("\nThe five most likely next tokens, each completed:")
    for alternative in model.alternatives("The old house", 5, max_new_tokens=8):
        print(f"  The old house{alternative.text!r}")

    print("\nMany prompts at once, each with its own options:")
    with model.engine(max_batch_size=8) as engine:
        requests = [
            engine.submit(f"{name} said", seed=n, temperature=0.7, max_new_tokens=12)
            for n, name in enumerate(("Anna", "Peter"))
        ]
        for request in requests:
            print(f"  {request.result().text!r}")


if __name__ == "__main__":
    main()
