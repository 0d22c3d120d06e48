"""The report lists who joined and left, and what happened."""

from dataclasses import replace

from recorded import record
from report_page import keys

from flower_desloc.app.runs.report import load
from flower_desloc.app.runs.report.tables import attendance, event_counts, events
from flower_desloc.flower.observer import Event


def test_joins_and_leaves_are_listed(tmp_path):
    absent = {"client-3": range(16, 33), "client-1": range(80, 97), "client-2": range(176, 193)}

    def change(window):
        out = {"client-0": "its [params] hold NaN"} if window.step == 48 else {}
        gone = {*out, *(name for name, steps in absent.items() if window.step in steps)}
        present = {name: c for name, c in window.clients.items() if name not in gone}
        return replace(window, clients=present, left_out=out)

    run = record(tmp_path, change=change, finish=False)
    assert attendance(load(run.path)).rows == [
        ["32", "client-3", "joined"],
        ["64", "client-1", "left"],
        ["96", "client-1", "came back"],
        ["160", "client-2", "left"],
    ]


def test_events_are_counted_by_client_and_kind(tmp_path):
    def change(window):
        told = []
        if window.step in (16, 48):
            told.append(Event(kind="late", client="client-10", what="no reply"))
        if window.step == 48:
            told.append(Event(kind="repeated", client="", what="1 usable reply"))
            told.append(Event(kind="state lost", client="client-9", what="all is sent"))
        return replace(window, events=told)

    loaded = load(record(tmp_path, change=change, finish=False).path)
    counts = event_counts(loaded)
    assert counts.head == ["client", "late", "state lost", "repeated"]
    assert counts.rows == [
        ["all", "0", "0", "1"],
        ["client-9", "0", "1", "0"],
        ["client-10", "2", "0", "0"],
    ]
    assert events(loaded).rows == [
        ["0 to 48", "client-10", "late", "2", "no reply"],
        ["32 to 48", "all", "repeated", "1", "1 usable reply"],
        ["32 to 48", "client-9", "state lost", "1", "all is sent"],
    ]
    assert "events" in keys(loaded)
