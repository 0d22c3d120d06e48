"""The ServerApp: the schedule of the averages, and the run."""

import torch
from flwr.app import ConfigRecord
from flwr.serverapp import ServerApp

from desloc_quickstart.task import make_model
from flower_desloc import DesLoc, Policy, SyncSchedule, from_record, to_record

app = ServerApp()


def metrics(totals):
    """Return the metrics of totals that were added over sites."""
    examples = totals["examples"]
    return {"loss": totals["nats"] / examples, "accuracy": totals["correct"] / examples}


@app.main()
def main(grid, context):
    """Train, print the course, save the averaged model."""
    config = context.run_config
    schedule = SyncSchedule(
        {
            "params": config["params-period"],
            "exp_avg": config["exp-avg-period"],
            "exp_avg_sq": config["exp-avg-sq-period"],
        }
    )
    strategy = DesLoc(
        schedule,
        config["num-steps"],
        policy=Policy(min_clients=config["min-nodes"]),
        eval_every=48,
        metrics=metrics,
    )
    names = ("learning-rate", "batch-size", "alpha")
    settings = ConfigRecord({name: config[name] for name in names})
    start = to_record(dict(make_model().named_parameters()))
    result = strategy.start(grid, start, settings)
    for window, measured in result.evaluate_metrics_clientapp.items():
        print(f"window {window}: loss {measured['loss']:.3f}, accuracy {measured['accuracy']:.3f}")
    torch.save(from_record(result.arrays), "final_model.pt")
