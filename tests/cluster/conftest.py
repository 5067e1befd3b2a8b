"""A moto cloud, fresh for each test."""

from tests.support.moto_fixtures import aws, clock, cloud, gateway, on
