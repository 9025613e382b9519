"""Ray's part of the choice: `Fleet` decides, and this tells it which replicas there are and where requests went."""

from __future__ import annotations

from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from nanoinfer.serve.ray.fleet import Fleet, RoutedRequest


class PrefixRouter(RequestRouter):
    """Routes calls one of whose arguments is a `RoutedRequest`; others go to the least loaded replica.

    Whoever calls says when a request has left, so Ray's own notes of that are not used.
    """

    # Ray asks a replica for its queue before it sends what was chosen for it. In Ray's 0.1 s a busy one may not answer,
    # and the request would go where its KV does not lie.
    queue_len_response_deadline_s = 2.0

    def initialize_state(self, **arguments: Any) -> None:
        """Called by Ray before all others, with the arguments of `Fleet`."""
        self._fleet = Fleet(**arguments)

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        super().update_replicas(replicas)
        self._fleet.keep(self.curr_replicas)

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        super().on_replica_actor_died(replica_id)
        self._fleet.keep(self.curr_replicas)

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Return one replica, and behind it the others, for where Ray cannot reach it."""
        chosen = self._fleet.place(_routed(pending_request))
        others = [place.replica for place in self._fleet.by_load() if place.replica != chosen]
        known = self.curr_replicas
        return [[known[replica]] for replica in (chosen, *others) if replica in known]

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any) -> None:
        self._fleet.move(_routed(pending_request), replica_id)


def _routed(pending_request: PendingRequest | None) -> RoutedRequest:
    arguments = pending_request.args if pending_request is not None else ()
    return next((one for one in arguments if isinstance(one, RoutedRequest)), None) or RoutedRequest()
