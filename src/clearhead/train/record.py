import json


class Record:
    def __init__(self, run):
        self.run = run

    def write(self, e):
        if self.run is None:
            return
        self.run.mkdir(parents=True, exist_ok=True)
        with open(self.run / "log.jsonl", "a") as f:
            f.write(json.dumps(e) + "\n")

    def rewind(self, step):
        pass
