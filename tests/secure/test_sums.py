"""Laws of secure sums: exact, hidden below the threshold, and refused to a server that lies."""

import json
import os
import shlex
import stat
from collections.abc import Mapping
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from sums import Sites, codes, in_order, plain, same, terms

from flower_desloc.core.errors import SiteRefusedError
from flower_desloc.secure import masks, shares
from flower_desloc.secure.__main__ import main
from flower_desloc.secure.agreement import NARROW, SHORT, WIDE, Keys, SumTerms, stated
from flower_desloc.secure.codes import (
    encode,
    largest_of,
    mean_of,
    packed,
    scale_after,
    scale_for,
    signed,
    unpacked,
)
from flower_desloc.secure.given import given_file
from flower_desloc.secure.identity import Identity, create, introduce
from flower_desloc.secure.server import HiddenSumError, ServerSum
from flower_desloc.secure.site import SiteSum


@pytest.mark.parametrize("phase", range(4))
@pytest.mark.parametrize(("number", "tolerated"), [(3, 0), (4, 0), (4, 1), (7, 2)])
def test_the_masked_sum_is_the_plain_sum_with_sites_gone_in_any_phase(
    tmp_path, number, tolerated, phase
):
    sites, server = Sites(tmp_path, number), ServerSum(terms(number))
    gone = sites.names[1 : 1 + tolerated]
    sites.until_masked(server, dict.fromkeys(gone, phase))
    sites.unmask(server, gone)
    has_sent = [m for m in range(number) if phase == 3 or sites.names[m] not in gone]
    assert same(server.total(), plain(has_sent))


@pytest.mark.parametrize("phase", range(4))
def test_below_the_threshold_nothing_is_revealed(tmp_path, phase):
    sites, server = Sites(tmp_path, 4), ServerSum(terms(4))
    gone = sites.names[:2]
    with pytest.raises(HiddenSumError, match=r"only 2 sites .* steps 1 to 16 needs 3"):  # noqa: PT012
        sites.until_masked(server, dict.fromkeys(gone, phase))
        sites.unmask(server, gone)
        server.total()
    if phase == 2:  # what the server has are masks
        assert not same(server._sum, plain([2, 3]))
        for name in sites.names[2:]:
            with pytest.raises(ValueError, match="only 2 sites are in the sum"):
                sites.restarted(name).confirm(sites.names[2:])


def test_what_a_site_sends_differs_in_every_value_and_at_every_try(tmp_path):
    sent = []
    for _ in range(2):
        sites, server = Sites(tmp_path, 3), ServerSum(terms(3))
        sites.until_masked(server, {})
        arrays = codes(0)
        sites, server = Sites(tmp_path, 3), ServerSum(terms(3))
        for name, site in sites.sites.items():
            server.add_keys(name, site.keys(server.terms, None))
        for name, site in sites.sites.items():
            server.add_shares(name, site.shares(server.keys))
        first = sites.sites["site-a"]
        first.receive(server.sealed_for("site-a"), server.terms.averages, None, ())
        first.mask(in_order(arrays))
        sent.append(np.concatenate(in_order(arrays)))
    assert not np.any(sent[0] == np.concatenate(in_order(codes(0))))
    assert not np.any(sent[0] == sent[1])


def test_a_mask_is_the_same_for_any_split_into_arrays():
    key, whole = bytes(range(32)), np.zeros(300_001, np.int64)
    parts = [np.zeros(size, np.int64) for size in (0, 1, 170_000, 130_000)]
    masks.add_masks([whole], [(key, 1)])
    masks.add_masks(parts, [(key, 1)])
    assert np.array_equal(np.concatenate(parts), whole)
    assert len(np.unique(whole)) == len(whole)
    masks.add_masks([whole], [(key, -1)])
    assert not whole.any()


def test_too_few_shares_give_another_secret():
    secret = bytes(range(32))
    parts = dict(enumerate(shares.split(secret, 3, 5)))
    assert shares.join(parts, 3) == secret
    assert shares.join({place: parts[place] for place in (1, 3, 4)}, 3) == secret
    assert shares.join({place: parts[place] for place in (1, 3)}, 2) != secret


# A server that lies


def swapped(keys, name, other):
    return {**keys, name: replace(Keys.of(keys[name]), mask=Keys.of(keys[other]).mask).to_bytes()}


def begun(sites, server):
    for name, site in sites.sites.items():
        server.add_keys(name, site.keys(server.terms, None))
    return server.keys


def test_a_key_that_the_server_swaps_is_refused(tmp_path):
    sites = Sites(tmp_path, 3)
    keys = begun(sites, ServerSum(terms(3)))
    first = sites.sites["site-a"]
    with pytest.raises(ValueError, match="signed by 'site-b' is not"):
        first.shares(swapped(keys, "site-b", "site-c"))
    with pytest.raises(ValueError, match="'site-a' are not its own"):
        first.shares(swapped(keys, "site-a", "site-c"))
    with pytest.raises(ValueError, match="'site-x' is not among the peers of 'site-a'"):
        first.shares({"site-a": keys["site-a"], "site-b": keys["site-b"], "site-x": keys["site-c"]})


def test_keys_and_shares_of_another_sum_are_refused(tmp_path):
    sites = Sites(tmp_path, 3)
    old = begun(sites, earlier := ServerSum(terms(3)))
    for name, site in sites.sites.items():
        earlier.add_shares(name, site.shares(old))
    for changed in (
        {"start": 16, "stop": 32},
        {"run": "other"},
        {"attempt": "two"},
        {"request": "2f"},
    ):
        new = begun(sites, ServerSum(terms(3, **changed)))
        with pytest.raises(ValueError, match=r"signed by 'site-b' is not: .* another window"):
            sites.sites["site-a"].shares({**new, "site-b": old["site-b"]})
    # Of the same sum, asked for twice: the signature holds, and the shares do not.
    again = begun(sites, ServerSum(terms(3)))
    first = sites.sites["site-a"]
    first.shares({**again, "site-b": old["site-b"]})
    sealed = {name: earlier._sealed[name]["site-a"] for name in ("site-b", "site-c")}
    with pytest.raises(ValueError, match=r"shares of 'site-b' .* belong to another sum"):
        first.receive(sealed, terms(3).averages, None, ())


def test_a_site_begins_from_the_averages_that_all_agreed_on(tmp_path):
    sites, server = Sites(tmp_path, 3), ServerSum(terms(3))
    keys = begun(sites, server)
    for name, site in sites.sites.items():
        server.add_shares(name, site.shares(keys))
    first, sealed = sites.sites["site-a"], server.sealed_for("site-a")
    for sent in (
        {"params": stated(0, "1f")},
        {"params": stated(1, "0f")},
        {**server.terms.averages, "exp_avg": stated(0, "0f", 0.5)},
    ):
        with pytest.raises(ValueError, match="is not the one that all sites of the sum agreed on"):
            first.receive(sealed, sent, None, ())
    with pytest.raises(ValueError, match="is not the one that all sites of the sum agreed on"):
        first.receive(sealed, {}, None, ())  # it has none
    first.receive(sealed, server.terms.averages, None, ())


def test_too_few_sites_and_too_low_a_threshold_are_refused(tmp_path):
    sites = Sites(tmp_path / "a", 4)
    keys = begun(sites, ServerSum(terms(4)))
    with pytest.raises(ValueError, match="threshold of 3 for 2 sites: it must be at least 2"):
        sites.sites["site-a"].shares({name: keys[name] for name in ("site-a", "site-b")})
    with pytest.raises(ValueError, match=r"secure-min=3 .* federation.min_clients=3"):
        sites.sites["site-a"].keys(terms(4, threshold=2), None)
    sites = Sites(tmp_path / "b", 6)
    keys = begun(sites, ServerSum(terms(6, threshold=4)))
    with pytest.raises(ValueError, match="threshold of 4 for 6 sites: it must be at least 5"):
        sites.sites["site-a"].shares(keys)


def test_a_site_refuses_more_sites_than_the_codes_have_room_for(tmp_path):
    sites = Sites(tmp_path, 4)
    keys = begun(sites, ServerSum(terms(4, most=3)))
    first = sites.sites["site-a"]
    with pytest.raises(ValueError, match="4 sites in a sum whose codes are for 3"):
        first.shares(keys)
    assert first.shares({name: keys[name] for name in sites.names[:3]})


def test_a_site_refuses_codes_for_more_sites_than_it_has_peers(tmp_path):
    first = Sites(tmp_path, 3).sites["site-a"]
    for most in (4, 2**20):
        why = f"a sum of up to {most} sites, and the peers' file of 'site-a' has 3"
        with pytest.raises(ValueError, match=why):
            first.keys(terms(3, most=most), None)
    assert first.keys(terms(3, most=3), None)


def test_no_site_gives_both_shares_of_another(tmp_path):
    sites, server = Sites(tmp_path, 4), ServerSum(terms(4))
    sites.until_masked(server, {})
    everybody, without = sites.names, sites.names[:3]
    first = sites.restarted("site-a")
    first.confirm(everybody)
    first = sites.restarted("site-a")  # it remembers
    with pytest.raises(ValueError, match="two lists could give away a single site"):
        first.confirm(without)
    with pytest.raises(ValueError, match="'site-d' is not in the sum, which has sent its part"):
        sites.restarted("site-d").confirm(without)
    sites.unmask(server)
    with pytest.raises(ValueError, match="out of turn: it is at 'given'"):
        sites.restarted("site-a").confirm(without)
    for signatures in (server.signatures, {}):  # the answer may have been lost
        given = sites.restarted("site-a").unmask(signatures)
        assert {name: part[1:] for name, part in given.items()} == {
            name: server._shares[name][0] for name in sites.names
        }


def test_a_site_gives_no_share_while_others_have_confirmed_another_list(tmp_path):
    sites, server = Sites(tmp_path, 4), ServerSum(terms(4))
    sites.until_masked(server, {"site-d": 2})
    signed = {
        name: sites.restarted(name).confirm(server.survivors) for name in ("site-a", "site-b")
    }
    third = sites.restarted("site-c")
    third.confirm(server.survivors)
    with pytest.raises(ValueError, match="only 2 sites have confirmed"):
        third.unmask(signed)
    other = Identity.read(tmp_path, "site-d").sign(b"another list")
    for name in ("site-c", "site-d", "site-x"):
        with pytest.raises(ValueError, match="only 2 sites have confirmed"):
            third.unmask({**signed, name: other})
    own = third.confirm(server.survivors)
    assert third.unmask({**signed, "site-c": own, "site-d": other})


def test_a_window_is_given_away_over_one_list_of_sites(tmp_path):
    sites, server = Sites(tmp_path, 4), ServerSum(terms(4))
    sites.until_masked(server, {})
    sites.unmask(server)
    again = ServerSum(terms(4, attempt="two"))
    sites.until_masked(again, {"site-d": 2})
    with pytest.raises(ValueError, match=r"given away already.* repeat it with the same sites"):
        sites.unmask(again)
    third = ServerSum(terms(4, attempt="three"))
    sites.until_masked(third, {})
    sites.unmask(third)
    assert same(third.total(), plain(range(4)))


OWN = terms(4).averages


@pytest.mark.parametrize(
    ("run", "changed"),
    [
        ("run", {"start": 8, "stop": 24, "averages": {"params": stated(8, "2f")}}),  # overlaps
        ("run", {"start": 16, "stop": 32}),
        ("other", {"run": "other"}),  # begins from the same averages
        ("other", {"run": "other", "start": 1, "averages": {"params": stated(1, "0f", 0.5)}}),
        ("run", {"start": 16, "stop": 32, "averages": {"params": stated(16, "0f", 0.5)}}),
        ("other", {"run": "other", "averages": {**OWN, "exp_avg": stated(0, "aa")}}),
    ],
)
def test_no_message_and_no_new_run_makes_a_site_forget_what_it_gave(
    tmp_path, monkeypatch, run, changed
):
    sites, server = Sites(tmp_path, 4), ServerSum(terms(4))
    sites.until_masked(server, {})
    sites.unmask(server)
    for name in sites.names:
        sites.restarted(name).forget()
    again = ServerSum(terms(4, **changed))
    monkeypatch.setattr(sites, "restarted", partial(sites.restarted, run=run))
    sites.until_masked(again, {"site-d": 2})
    with pytest.raises(
        ValueError, match=r"given away already.*\.secure forget` as in its log"
    ) as told:
        sites.unmask(again)
    said, _, command = told.value.__notes__[0].partition(": python -m flower_desloc.secure ")
    assert said == f"the sum of steps 1 to 16 of run over {sites.names}"
    for name in sites.names[:3]:
        words = shlex.split(command.replace("site-a", name))
        assert main(words) == 0
        assert main(words) == 1  # by now there is nothing left to forget
    sites.until_masked(again := ServerSum(terms(4, **changed)), {"site-d": 2})
    sites.unmask(again)


def test_a_site_forgets_the_steps_that_a_person_names_and_no_others(tmp_path, capsys):
    path, record = given(sites := Sites(tmp_path, 4)), str(tmp_path / "site-a.json")
    later = terms(4, start=16, stop=32, averages={"params": stated(16, "2f")})
    sites.until_masked(server := ServerSum(later), {})
    sites.unmask(server)
    before = path.read_bytes()
    for words in (["run", "1", "15"], ["run", "2", "16"], ["other", "1", "16"]):
        assert main(["forget", record, *words]) == 1
        assert "it gave no sum within the steps" in capsys.readouterr().err
    assert main(["forget", record, "run", "1", "x"]) == 2
    assert main(["forget", str(tmp_path / "site-x.json"), "run", "1", "16"]) == 1
    assert path.read_bytes() == before
    assert main(["forget", record, "run", "1", "16"]) == 0
    assert "forgot the sum of steps 1 to 16 of run over ['site-a'" in capsys.readouterr().out
    assert path.read_bytes().startswith(before)
    sites.until_masked(again := ServerSum(replace(later, attempt="two")), {"site-d": 2})
    with pytest.raises(ValueError, match="given away already"):
        sites.unmask(again)
    path.write_bytes(before[:-9])
    assert main(["forget", record, "run", "1", "16"]) == 1
    assert "damaged or incomplete" in capsys.readouterr().err


def test_a_later_window_of_the_same_run_may_go_on_from_parameters_that_were_not_due(tmp_path):
    sites, server = Sites(tmp_path, 4), ServerSum(terms(4))
    sites.until_masked(server, {})
    sites.unmask(server)
    averages = {**OWN, "exp_avg": stated(16, "aa", 0.5)}  # which was
    later = ServerSum(terms(4, start=16, stop=32, averages=averages))
    sites.until_masked(later, {"site-d": 0})
    sites.unmask(later)
    assert same(later.total(), plain(range(3)))


def test_another_number_of_the_same_average_makes_no_other_sum(tmp_path):
    averages = {**OWN, "exp_avg": stated(0, "aa", 0.5)}
    sites, server = Sites(tmp_path, 4), ServerSum(terms(4, averages=averages, fresh=True))
    sites.until_masked(server, {})
    sites.unmask(server)
    renamed = {**OWN, "exp_avg": stated(16, "aa", 0.7)}
    later = ServerSum(terms(4, start=16, stop=32, averages=renamed, fresh=True))
    sites.until_masked(later, {"site-d": 2})
    with pytest.raises(ValueError, match="given away already"):
        sites.unmask(later)


@pytest.mark.parametrize("text", ["", "{}", '{"given": [{"run": "r"}]}', "\udcff"])
def test_a_record_that_cannot_be_read_is_named_and_nothing_is_given(tmp_path, text):
    sites = Sites(tmp_path, 4)
    (tmp_path / "site-a.json").write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(SiteRefusedError, match=r"secure/site-a\.json in its state-dir, is damaged"):
        sites.until_masked(ServerSum(terms(4)), {})


def given(sites, name="site-a"):
    """Let the sites give a sum; return the file of what one of them gave."""
    sites.until_masked(server := ServerSum(terms(len(sites.names))), {})
    sites.unmask(server)
    return given_file(sites.folder / f"{name}.json")


@pytest.mark.parametrize(
    "damage",
    [
        lambda path: path.unlink(),
        lambda path: path.write_bytes(b""),
        lambda path: path.write_bytes(path.read_bytes()[:-9]),  # a line that was on the disk
        lambda path: path.write_bytes(b"{}\n" + path.read_bytes()),
        lambda path: path.write_bytes(path.read_bytes().replace(b'"run"', b'"ruu"')),
        lambda path: path.write_bytes(b"\xff\n" + path.read_bytes()),
    ],
)
def test_a_site_that_does_not_know_what_it_gave_gives_nothing(tmp_path, damage):
    sites = Sites(tmp_path, 4)
    damage(given(sites))
    sites.until_masked(again := ServerSum(terms(4)), {})
    why = r"secure/site-a\.given\.jsonl .* damaged or incomplete; .* and secure/site-a\.json"
    with pytest.raises(SiteRefusedError, match=why):
        sites.unmask(again)


@pytest.mark.parametrize("torn", [b'{"run": "r', b"\xff"])
def test_a_line_that_a_killed_process_began_was_never_acted_on(tmp_path, torn):
    path = given(sites := Sites(tmp_path, 4))
    before = path.read_bytes()
    path.write_bytes(before + torn)
    later = terms(4, start=16, stop=32, averages={"params": stated(16, "2f")})
    sites.until_masked(server := ServerSum(later), {})
    sites.unmask(server)
    first, second = path.read_bytes().splitlines(keepends=True)
    assert first == before
    assert json.loads(second)["given"]["start"] == 16


def test_a_sum_that_was_given_before_the_site_was_killed_is_known_and_given_again(
    tmp_path, monkeypatch
):
    sites, server = Sites(tmp_path, 4), ServerSum(terms(4))
    sites.until_masked(server, {})
    for name in sites.names:
        server.add_signature(name, sites.restarted(name).confirm(server.survivors))
    with monkeypatch.context() as patch:
        patch.setattr(SiteSum, "_save", lambda *asked: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            sites.restarted("site-a").unmask(server.signatures)
    path = given_file(tmp_path / "site-a.json")
    line = path.read_bytes()
    assert line  # it is on the disk before the site's other file says that it was given
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    synced: list[int] = []
    with monkeypatch.context() as patch:  # its process may have been killed before it did so
        patch.setattr("os.fsync", lambda file: synced.append(os.fstat(file).st_ino))
        assert sites.restarted("site-a").unmask(server.signatures)
    assert path.stat().st_ino in synced
    assert path.read_bytes() == line
    sites.until_masked(again := ServerSum(terms(4, attempt="two")), {"site-d": 2})
    with pytest.raises(ValueError, match="given away already"):
        sites.unmask(again)


def test_what_a_site_writes_does_not_grow_with_the_sums_that_it_gave(tmp_path):
    sites, sizes = Sites(tmp_path, 3), []
    path = tmp_path / "site-a.json"
    for n in range(4):
        averages = {"params": stated(16 * n, f"{n:02}", 0.5)}
        now = terms(3, start=16 * n, stop=16 * n + 16, averages=averages)
        before = given_file(path).read_bytes() if n else b""
        sites.until_masked(server := ServerSum(now), {})
        sites.unmask(server)
        assert given_file(path).read_bytes().startswith(before)
        sizes.append(path.stat().st_size)
    assert max(sizes) - min(sizes) < 50  # its digits


def test_no_average_that_sites_hold_is_left_out_of_what_they_agree_on(tmp_path):
    """Else the same steps from the same averages were another window, over another list."""
    averages = {"params": stated(0, "0f", 0.5), "exp_avg": stated(0, "aa", 0.5)}
    sites = Sites(tmp_path, 4)

    def window(server: ServerSum, held: int | None, came: Mapping[str, str]) -> None:
        run = {name: sites.restarted(name, server.terms.run) for name in sites.names}
        for name, site in run.items():
            server.add_keys(name, site.keys(server.terms, held))
        for name, site in run.items():
            server.add_shares(name, site.shares(server.keys))
        for m, (name, site) in enumerate(run.items()):
            site.receive(server.sealed_for(name), came, held, () if held is None else {held})
            site.mask(in_order(codes(m)))

    window(ServerSum(terms(4, averages=averages)), None, averages)
    less = {"params": averages["params"]}
    later = ServerSum(terms(4, start=16, stop=32, averages=less))
    with pytest.raises(ValueError, match="the average of 'exp_avg' is not the one that all sites"):
        window(later, 16, {})


def test_averages_that_hardly_differ_are_others_which_no_site_can_tell(tmp_path, monkeypatch):
    sites, server = Sites(tmp_path, 4), ServerSum(terms(4))
    sites.until_masked(server, {})
    sites.unmask(server)
    near = {"params": stated(0, "0e", 0.5)}  # docs/explanation/privacy.md: not protected
    again = ServerSum(terms(4, run="other", averages=near))
    monkeypatch.setattr(sites, "restarted", partial(sites.restarted, run="other"))
    sites.until_masked(again, {"site-d": 2})
    sites.unmask(again)
    tells = [one - other for one, other in zip(server.total(), again.total(), strict=True)]
    assert same(tells, in_order(codes(3)))


def taken(sites, names, held=None, sent=None, **changed):
    """Let the named sites take a window, of which no sum comes; by default all averages come."""
    server = ServerSum(terms(3, **changed))
    for name, site in sites.sites.items():
        server.add_keys(name, site.keys(server.terms, held))
    keys = server.keys
    for name, site in sites.sites.items():
        server.add_shares(name, site.shares(keys))
    for name in names:
        averages = server.terms.averages if sent is None else sent
        sites.sites[name].receive(server.sealed_for(name), averages, held, {held})
        sites.sites[name].mask(in_order(codes(0)))


def test_a_site_knows_no_more_of_states_that_it_no_longer_has(tmp_path):
    sites = Sites(tmp_path, 3)
    taken(sites, sites.names)
    taken(sites, sites.names, 16, sent={}, **LATER)  # which has the state after step 16
    record = json.loads((tmp_path / "site-a.json").read_text())
    assert list(record["origins"]["run"]) == ["16", "32"]
    taken(sites, sites.names, 32, sent={}, start=32, stop=48)
    record = json.loads((tmp_path / "site-a.json").read_text())
    assert list(record["origins"]["run"]) == ["32", "48"]


LATER = {"start": 16, "stop": 32}


def test_an_average_that_a_site_has_is_stated_as_it_came(tmp_path):
    sites = Sites(tmp_path, 3)
    taken(sites, sites.names)
    for stated_now in (stated(0, "0f", 0.25), stated(0, "1f", 0.5)):
        with pytest.raises(ValueError, match="is not the one that all sites of the sum agreed on"):
            taken(sites, ["site-a"], 16, sent={}, averages={"params": stated_now}, **LATER)
    taken(sites, sites.names, 16, sent={}, **LATER)


def test_a_sum_is_of_sites_that_have_taken_the_same_windows_since_the_averages(tmp_path):
    sites = Sites(tmp_path, 3)
    taken(sites, ["site-a"])  # the others have not been asked
    with pytest.raises(ValueError, match="'site-b' and 'site-a' have taken other windows since"):
        taken(sites, [], held=16, **LATER)
    taken(sites, ["site-b", "site-c"], request="2f")  # nor by other settings
    with pytest.raises(ValueError, match="have taken other windows"):
        taken(sites, [], held=16, **LATER)
    server = ServerSum(terms(3, fresh=True, **LATER))
    keys = begun(sites, server)
    for name, site in sites.sites.items():
        server.add_shares(name, site.shares(keys))
    first = sites.sites["site-a"]
    with pytest.raises(ValueError, match="is not the one that it stated to the others"):
        first.receive(server.sealed_for("site-a"), {}, 16, {16})  # but its state is still there
    first.receive(server.sealed_for("site-a"), server.terms.averages, None, ())
    with pytest.raises(ValueError, match="it does not begin from the averages alone"):
        server.add_keys("site-a", first.keys(terms(3, **LATER), 16))
    taken(sites, sites.names)
    taken(sites, sites.names, held=16, **LATER)  # by now all have


def test_the_history_of_a_state_is_not_known_until_its_window_is_complete(tmp_path):
    sites = Sites(tmp_path, 3)
    taken(sites, sites.names)
    server = ServerSum(terms(3, request="2f"))
    keys = begun(sites, server)
    for name, site in sites.sites.items():
        server.add_shares(name, site.shares(keys))
    for name, site in sites.sites.items():  # the window is begun again, and does not end
        site.receive(server.sealed_for(name), server.terms.averages, None, ())
    with pytest.raises(ValueError, match="have taken other windows"):
        taken(sites, [], held=16, **LATER)


def test_two_processes_of_a_site_use_no_mask_twice_and_confirm_one_list(tmp_path):
    sites, server = Sites(tmp_path, 4), ServerSum(terms(4))
    keys = begun(sites, server)
    for name, site in sites.sites.items():
        server.add_shares(name, site.shares(keys))
    one, other = sites.restarted("site-a"), sites.restarted("site-a")
    for process in (one, other):
        process.receive(server.sealed_for("site-a"), server.terms.averages, None, ())
    one.mask(in_order(codes(0)))
    with pytest.raises(ValueError, match="out of turn: it is at 'masked'"):
        other.mask(in_order(codes(99)))
    for name in sites.names[1:]:
        sites.sites[name].receive(server.sealed_for(name), server.terms.averages, None, ())
    one.confirm(sites.names)
    with pytest.raises(ValueError, match="two lists could give away a single site"):
        other.confirm(sites.names[:3])
    refused = pytest.raises(ValueError, match="another process of 'site-a'")
    with one.training(), refused, other.training():
        pass


def test_one_mask_hides_one_value(tmp_path):
    sites, server = Sites(tmp_path, 3), ServerSum(terms(3))
    sites.until_masked(server, {})
    with pytest.raises(ValueError, match="out of turn: it is at 'masked'"):
        sites.restarted("site-a").mask(in_order(codes(1)))
    with pytest.raises(ValueError, match="out of turn"):
        sites.restarted("site-a").unmask({})


def test_a_false_share_is_named_and_not_believed(tmp_path):
    sites, server = Sites(tmp_path, 3), ServerSum(terms(3))
    sites.until_masked(server, {})
    sites.unmask(server)
    place, share = next(iter(server._shares["site-b"].items()))
    server._shares["site-b"][place] = bytes(reversed(share))
    with pytest.raises(HiddenSumError, match="secret of 'site-b': a site has sent a false one"):
        server.total()


def test_a_false_share_among_spare_ones_is_left_out_and_its_site_named(tmp_path):
    sites, server = Sites(tmp_path, 4), ServerSum(terms(4))
    sites.until_masked(server, {})
    sites.unmask(server)
    server._shares["site-b"][0] = bytes(32)
    assert same(server.total(), plain(range(4)))
    assert server.false == {"site-a"}


def test_false_shares_of_three_sites_of_twenty_do_not_hide_a_sum(tmp_path, monkeypatch):
    server = ServerSum(terms(20))
    keys = Keys.of(begun(Sites(tmp_path, 3), ServerSum(terms(3)))["site-a"])
    server._keys = {f"site-{m:02}": keys for m in range(20)}
    tries, secret = list[None](), bytes(range(32))
    monkeypatch.setattr(server, "_is_secret", lambda name, found: found == secret)

    def join(given, least):
        tries.append(None)
        return bytes(32) if {*given} & {0, 1, 2} else secret

    monkeypatch.setattr(shares, "join", join)
    for name in ("site-05", "site-06"):
        server._shares[name] = dict.fromkeys(range(20), bytes(32))
        assert server._secret(name) == secret
    assert server.false == {"site-00", "site-01", "site-02"}
    assert len(tries) < 1000


def test_true_shares_are_joined_twice_and_not_for_each_spare_one(tmp_path, monkeypatch):
    sites, server = Sites(tmp_path, 10), ServerSum(terms(10))
    sites.until_masked(server, {})
    sites.unmask(server)
    tries, join = list[None](), shares.join

    def counted(given, least):
        tries.append(None)
        return join(given, least)

    monkeypatch.setattr(shares, "join", counted)
    assert same(server.total(), plain(range(10)))
    assert len(tries) == 2 * 10
    assert not server.false


@pytest.mark.parametrize("which", ["mask", "channel"])
def test_keys_that_are_no_secret_are_named_by_the_server_and_refused_by_sites(tmp_path, which):
    sites, server = Sites(tmp_path, 3), ServerSum(terms(3))
    keys = begun(sites, server)
    bad = replace(Keys.of(keys["site-c"]), **{which: bytes(32)})
    signature = Identity.read(tmp_path, "site-c").sign(bad.signed(server.terms, "site-c"))
    data = replace(bad, signature=signature).to_bytes()
    with pytest.raises(ValueError, match="'site-c' has sent keys that are no secret"):
        server.add_keys("site-c", data)
    with pytest.raises(ValueError, match="'site-c' has sent keys that are no secret"):
        sites.sites["site-a"].shares({**keys, "site-c": data})


@pytest.mark.parametrize(
    "wrong",
    [
        {"threshold": float("nan")},
        {"threshold": 3.0},
        {"threshold": 1},
        {"start": 16},
        {"start": True},
        {"widths": {"params": 6.03, "exp_avg_sq": 8}},
        {"widths": {"params": 7, "exp_avg_sq": 8}},
        {"scales": {"params": 40.37, "exp_avg_sq": 40}},
        {"scales": {"params": 2000, "exp_avg_sq": 40}},
        {"most": float("inf")},
        {"averages": {"params": "1 0f 0.0"}},  # of a later step than the window's
        {"averages": {"params": "0 0f nan"}},
    ],
)
def test_what_a_sum_is_about_has_exact_types_and_ranges(wrong):
    with pytest.raises(ValueError, match="not the terms of a sum"):
        SumTerms.of_json(terms(3, **wrong).to_json())


def test_a_site_that_sends_what_was_not_asked_for_is_left_out(tmp_path):
    sites, server = Sites(tmp_path, 3), ServerSum(terms(3))
    keys = begun(sites, server)
    with pytest.raises(ValueError, match="192 bytes, not 1"):
        server.add_keys("site-a", b"x")
    sealed = sites.sites["site-a"].shares(keys)
    with pytest.raises(ValueError, match="expected all other sites"):
        server.add_shares("site-a", {"site-b": sealed["site-b"]})
    text = terms(3).to_json()
    assert SumTerms.of_json(text) == terms(3)
    for wrong in ("{}", "[]", text.replace("16", "17 "), text.replace('"params": 4', '"other": 4')):
        with pytest.raises(ValueError, match="not the terms of a sum"):
            SumTerms.of_json(wrong)


# Keys and codes


def test_a_site_has_one_key_that_only_it_can_read_and_peers_by_name(tmp_path, capsys):
    assert main([str(tmp_path), "site-a"]) == 0
    line = capsys.readouterr().out.strip()
    assert line == create(tmp_path, "site-a")
    assert stat.S_IMODE((tmp_path / "site-a.key").stat().st_mode) == 0o600
    (tmp_path / "peers").write_text(f"# ours\n{line}\n")
    assert set(Identity.read(tmp_path, "site-a").peers) == {"site-a"}
    (tmp_path / "peers").write_text(f"{line}\n{line.replace('site-a', 'site-b')}\n")
    with pytest.raises(ValueError, match="its peers cannot be read") as told:
        Identity.read(tmp_path, "site-a")
    assert "or its key twice" in told.value.__notes__[0]
    with pytest.raises(ValueError, match=r"python -m flower_desloc.secure FOLDER site-c"):
        Identity.read(tmp_path, "site-c")
    introduce(tmp_path / "b", ["site-a"])
    (tmp_path / "peers").write_text((tmp_path / "b" / "peers").read_text())
    with pytest.raises(ValueError, match="'site-a' is not the one that the peers' file names"):
        Identity.read(tmp_path, "site-a")


def test_the_file_of_a_sum_is_the_sites_own_and_forgets_what_it_gave(tmp_path):
    sites, server = Sites(tmp_path, 3), ServerSum(terms(3))
    sites.until_masked(server, {})
    path = tmp_path / "site-a.json"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    now = json.loads(path.read_text())["now"]["run"]
    assert now["seed"] == now["mask"] == now["channel"] == ""  # from here on it needs no secret
    sites.unmask(server)
    now = json.loads(path.read_text())["now"]["run"]
    assert all(len(part) == 66 for part in now["held"].values())  # one share of each site


@pytest.mark.parametrize("width", [SHORT, NARROW, WIDE])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_mean_from_codes_is_the_mean_within_its_rounding(dtype, width):
    noise = torch.Generator().manual_seed(0)
    each = [torch.randn(3, 50, dtype=dtype, generator=noise) for _ in range(5)]
    mean, largest = torch.stack(each).double().mean(0), float(torch.stack(each).abs().max())
    scale = scale_for(largest, 5, width)
    total = np.sum([encode(tensor, scale, 5, width) for tensor in each], axis=0)
    found = mean_of(total, scale, 5, each[0])
    assert found.dtype == dtype
    tolerance = 2.0**-scale + torch.finfo(dtype).eps * largest
    torch.testing.assert_close(found.double(), mean, rtol=0, atol=tolerance)


def test_second_moments_are_never_rounded_down_and_their_roots_hardly_up():
    v = torch.logspace(-45, 0, 200, dtype=torch.float64)
    scale = scale_for(1.0, 20, WIDE)
    found = mean_of(encode(v, scale, 20, WIDE, up=True), scale, 1, v)
    assert bool((found >= v).all())
    assert float((found.sqrt() - v.sqrt()).max()) < 2**-22
    assert float(encode(torch.zeros(1), scale, 20, WIDE, up=True)[0]) == 0


@pytest.mark.parametrize("largest", [0.0, 1e-45, 0.75, 3e38, 1e308])
def test_a_scale_follows_from_what_an_average_is_named(largest):
    stream = {"a": torch.tensor([-largest, largest / 2], dtype=torch.float64), "b": torch.empty(0)}
    named = stated(0, "0f", largest_of(stream))
    assert (
        SumTerms.of_json(terms(3, averages={"params": named}).to_json()).averages["params"] == named
    )
    assert scale_after(named, 4, NARROW) == scale_for(largest, 4, NARROW)


@pytest.mark.parametrize("width", [SHORT, NARROW, WIDE])
def test_codes_come_back_from_their_lowest_bytes(width):
    most = 2 ** (8 * width - 1)
    codes = np.array([0, 1, -1, most - 1, -most], np.int64)
    data = packed(codes, width)
    assert data.dtype == np.uint8
    assert data.shape == (len(codes) * width,)
    assert np.array_equal(signed(unpacked(data, width), width), codes)


@pytest.mark.parametrize(("width", "times"), [(SHORT, 8), (NARROW, 1024), (WIDE, 1024)])
@pytest.mark.parametrize("beyond", [1.01, -1.01, float("nan"), float("inf")])
def test_a_value_beyond_the_room_of_its_code_is_refused(width, times, beyond):
    scale = scale_for(0.99, 4, width)
    assert encode(torch.tensor([times - 1.0]), scale, 4, width)[0] == (times - 1) * 2**scale
    with pytest.raises(ValueError, match="a value is not finite, or too large for the codes"):
        encode(torch.tensor([times * beyond]), scale, 4, width)
