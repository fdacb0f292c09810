"""A short campaign of `torture.py`: killed training resumes and ends as if uninterrupted."""

from pathlib import Path

from tests.train.torture import Campaign


def test_killed_runs_resume_and_lose_nothing(tmp_path: Path) -> None:
    campaign = Campaign(tmp_path, steps=20)
    while campaign.counts["killed"] < 5 or not campaign.counts["inside a save"]:
        campaign.kill()
    while campaign.counts["terminated"] < 3:
        campaign.terminate()
    campaign.finish()
    assert campaign.counts["finished"] > 0
