"""What Ray's own commands start: the two deployments, from options as names."""

import pytest

from nanoinfer.serve.ray import app

SMALL = {"model": "any", "device": "cpu", "max_model_len": "4k"}


def deployments(**arguments):
    """The deployments by name."""
    ingress = app(SMALL | arguments)._bound_deployment
    replica = ingress.init_args[0]._bound_deployment
    return ingress, replica


def test_options_are_those_of_the_command():
    ingress, replica = deployments(replicas="3", replica_cpus="0.5", strict="true", enable_prefix_caching="False")
    assert (ingress.name, replica.name) == ("Ingress", "Replica")
    (options, _), (_, same) = replica.init_args, ingress.init_args
    assert options == same and options["max_model_len"] == 4096 and options["strict"]
    assert options["enable_prefix_caching"] is False
    assert replica.num_replicas == 3 and replica.ray_actor_options["num_cpus"] == 0.5
    assert replica.ray_actor_options["num_gpus"] == 0


def test_a_range_of_replicas_is_for_ray_to_choose_from():
    _, replica = deployments(replicas="1-4")
    scaling = replica._deployment_config.autoscaling_config
    assert (scaling.min_replicas, scaling.max_replicas) == (1, 4)


def test_prefixes_may_be_left_out():
    routers = [
        deployments(**given)[1]._deployment_config.request_router_config for given in ({}, {"route_by_prefix": "false"})
    ]
    assert [router.request_router_kwargs for router in routers] == [{"by_prefix": True}, {"by_prefix": False}]
    assert all(router.get_request_router_class().__name__ == "PrefixRouter" for router in routers)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "no model is given: add model=MODEL"),
        (SMALL | {"port": "1"}, "port is Ray's own"),
        (SMALL | {"replcas": "1"}, "unknown option --replcas: did you mean --replicas?"),
        (SMALL | {"replicas": "0"}, "--replicas is '0'"),
        (SMALL | {"max-queue-bytes": "x"}, "--max-queue-bytes"),
        (SMALL | {"dtype": "int3"}, "dtype"),
    ],
)
def test_what_is_no_option_or_no_value_is_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        app(arguments)
