"""A model that fails on one rank, as a user's own may: FAULT="RANK:STEP:WHAT", WHAT being raise, nan, kill, sleep."""

from dataclasses import replace

from parrot import SPEC as PARROT

from titanlite.registry import register_model

SPEC = register_model(replace(PARROT, name="faulty", build="faulty.model:Faulty"))
