"""A model that fails on one rank: FAULT="RANK:STEP:KIND", with the kinds raise, nan, kill and
sleep.
"""

from dataclasses import replace

from parrot import SPEC as PARROT

from titanlite.registry import register_model

SPEC = register_model(replace(PARROT, name="faulty", build="faulty.model:Faulty"))
