"""FedAvg with Flower's simulation: a client app in one Ray actor with one CPU, and the strategy FedAvg.

The training function is the user's in Flower: here it is the one of its PyTorch tutorial. The server's part and Ray's
own processes run beside the actor.
"""

from __future__ import annotations

import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation
from torch import nn
from turns import CLIENT_INDEX, CLIENTS, COHORT, EPOCHS, LR, Turns, loader, steps_of

from fl_lightning.nets import MLP

PACKAGE = "flwr"


def client_app(memory: bool) -> ClientApp:
    app = ClientApp()

    @app.train()
    def train(message: Message, context: Context) -> Message:
        client = int(context.node_config["partition-id"])
        net = MLP()
        net.load_state_dict(message.content["arrays"].to_torch_state_dict())
        optimizer, criterion = torch.optim.SGD(net.parameters(), lr=LR), nn.CrossEntropyLoss()
        data = loader(client, memory)
        for _ in range(EPOCHS):
            for x, y in data:
                optimizer.zero_grad()
                criterion(net(x), y).backward()
                optimizer.step()
        counts = MetricRecord({"num-examples": len(CLIENT_INDEX[client]), "steps": steps_of(client)})
        return Message(
            content=RecordDict({"arrays": ArrayRecord(net.state_dict()), "metrics": counts}), reply_to=message
        )

    return app


def run(turns: Turns) -> None:
    app, taken = ServerApp(), []

    def count(replies: list[RecordDict], weighted_by: str) -> MetricRecord:
        taken.append(sum(reply["metrics"]["steps"] for reply in replies))
        return MetricRecord({"steps": taken[-1]})

    def round_over(number: int, arrays: ArrayRecord) -> None:
        """Flower's hook for evaluation on the server; it is also called before the first round."""
        if number:
            turns.round_over(taken[-1])

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        strategy = FedAvg(
            fraction_train=COHORT / CLIENTS,
            fraction_evaluate=0.0,
            min_available_nodes=CLIENTS,
            train_metrics_aggr_fn=count,
        )
        strategy.start(grid, ArrayRecord(MLP().state_dict()), num_rounds=turns.rounds, evaluate_fn=round_over)

    run_simulation(
        server_app=app,
        client_app=client_app(turns.memory),
        num_supernodes=CLIENTS,
        backend_config={"init_args": {"num_cpus": 1}, "client_resources": {"num_cpus": 1, "num_gpus": 0.0}},
    )
    if len(taken) != turns.rounds:
        raise RuntimeError(f"Flower ended after {len(taken)} of {turns.rounds} rounds.")
