"""The folder of the Flower app."""

import sys

from scripts import ROOT

from flower_desloc.app.config import app_folder


def test_the_app_is_imported_before_what_the_user_has_of_that_name(monkeypatch):
    monkeypatch.setattr(sys, "path", ["/mine", "/installed"])
    app_folder.make_importable()
    app_folder.make_importable()
    assert sys.path == [str(ROOT), "/mine", "/installed"]
