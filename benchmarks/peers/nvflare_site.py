"""A site of NVFlare: its Client API, as its documentation shows it."""

import nvflare.client as flare
from site_step import STEPS, Site


def main() -> None:
    """Train until the job ends."""
    flare.init()
    site = Site(flare.get_site_name())
    while flare.is_running():
        received = flare.receive()
        if received is None:
            break
        site.load(received.params)
        site.window()
        flare.send(flare.FLModel(params=site.params(), meta={"NUM_STEPS_CURRENT_ROUND": STEPS}))


if __name__ == "__main__":
    main()
