"""What holds for all tests: a property has no limit of wall time, for the machine that tries it may stand still for a second."""

from hypothesis import settings

settings.register_profile("strata", settings.default, deadline=None)
settings.load_profile("strata")
