from __future__ import annotations

import json
from pathlib import Path

import pytest

from forewarn.collectors.clock import ManualClock
from forewarn.collectors.errors import StorageError
from forewarn.daemon.controller.mailbox import REMEMBER_WEBHOOKS_S, Mailbox, Outcome
from forewarn.daemon.controller.messages import SaveRequest

ASKED = SaveRequest(protection="p1", job="llm")


def states_of(mailbox: Mailbox) -> list[tuple[str, str]]:
    return [(message.protection, message.body["state"]) for message in mailbox.undelivered()]


def test_a_repeat_gets_the_same_answer_and_asks_for_nothing_new(mailbox: Mailbox) -> None:
    first = mailbox.accept("msg_1", ASKED)
    mailbox.finish(["p1"], Outcome(state="completed", checkpoint="c", step=3, duration_seconds=0.1))
    assert mailbox.accept("msg_1", ASKED) == first == {"decision": "accepted", "protection": "p1"}
    assert mailbox.open_requests() == []
    assert states_of(mailbox) == [("p1", "accepted"), ("p1", "completed")]


def test_another_webhook_for_the_same_protection_says_where_it_stands(mailbox: Mailbox) -> None:
    mailbox.accept("msg_1", ASKED)
    assert mailbox.accept("msg_2", ASKED)["decision"] == "already_in_progress"
    mailbox.finish(["p1"], Outcome(state="failed", reason="disk full"))
    assert mailbox.accept("msg_3", ASKED)["decision"] == "duplicate"
    assert mailbox.open_requests() == []


def test_declined_requests_never_reach_the_loop(mailbox: Mailbox) -> None:
    answer = mailbox.accept("msg_1", ASKED, decline="not our job")
    assert answer == {"decision": "declined", "protection": "p1", "reason": "not our job"}
    assert mailbox.open_requests() == []
    assert not mailbox.flag.exists()
    assert [m.body for m in mailbox.undelivered()] == [{"state": "declined", "reason": "not our job"}]
    assert mailbox.accept("msg_1", ASKED) == answer


def test_everything_is_there_after_a_restart(tmp_path: Path, clock: ManualClock) -> None:
    first = Mailbox(tmp_path / "s", clock)
    first.accept("msg_1", ASKED)
    first.begin(["p1"])
    first.close()
    (tmp_path / "s" / "save-requested").unlink()
    second = Mailbox(tmp_path / "s", clock)
    assert second.open_requests() == [ASKED]
    assert second.flag.exists()
    assert states_of(second) == [("p1", "accepted")]
    assert second.accept("msg_1", ASKED)["decision"] == "accepted"
    second.close()


def test_flag_holds_the_requests_while_any_is_open(mailbox: Mailbox) -> None:
    mailbox.accept("msg_1", ASKED)
    mailbox.accept("msg_2", SaveRequest(protection="p2"))
    assert [r["protection"] for r in json.loads(mailbox.flag.read_bytes())] == ["p1", "p2"]
    mailbox.finish(["p1"], Outcome(state="completed", checkpoint="c"))
    assert mailbox.flag.exists()
    mailbox.finish(["p2"], Outcome(state="completed", checkpoint="c"))
    assert not mailbox.flag.exists()
    assert [p.name for p in mailbox.folder.glob("*.part")] == []


def test_an_ended_request_ends_once(mailbox: Mailbox) -> None:
    mailbox.accept("msg_1", ASKED)
    mailbox.finish(["p1"], Outcome(state="completed", checkpoint="c"))
    mailbox.finish(["p1", "never heard of"], Outcome(state="failed", reason="late"))
    assert mailbox.state_of("p1") == "completed"
    assert mailbox.state_of("never heard of") is None
    assert states_of(mailbox) == [("p1", "accepted"), ("p1", "completed")]


def test_two_openings_of_one_folder_see_each_other(mailbox: Mailbox, clock: ManualClock) -> None:
    loop = Mailbox(mailbox.folder, clock)
    mailbox.accept("msg_1", ASKED)
    assert loop.open_requests() == [ASKED]
    loop.finish(["p1"], Outcome(state="completed", checkpoint="c"))
    assert mailbox.state_of("p1") == "completed"
    loop.close()


def test_old_webhook_ids_are_forgotten_but_protections_are_not(mailbox: Mailbox, clock: ManualClock) -> None:
    mailbox.accept("msg_1", ASKED)
    mailbox.finish(["p1"], Outcome(state="completed", checkpoint="c"))
    clock.advance(REMEMBER_WEBHOOKS_S + 1)
    mailbox.accept("msg_2", SaveRequest(protection="p2"))
    assert mailbox.accept("msg_1", ASKED)["decision"] == "duplicate"


def test_damaged_database_and_unusable_folder_are_said_clearly(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match=r"controller\.state"):
        Mailbox(tmp_path / "file")
    (tmp_path / "s").mkdir()
    (tmp_path / "s" / "controller.db").write_bytes(b"not a database, " * 100)
    with pytest.raises(StorageError, match=r"controller\.state"):
        Mailbox(tmp_path / "s")
