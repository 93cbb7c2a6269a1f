"""Know before you pay: what a run takes on a cluster that is not here, and which layout suits it.

plan(config, on="2x8xH100") compiles the run's real step for the cluster and says what it takes;
report(jitted, args, on=...) does the same for any jitted function, plan_recipe for a trainer's own model;
replan(config, on, known) searches anew by what was measured;
explain(jitted, args, on=...) says what a step is made of, what could be fused and what the compiler fuses,
explain_recipe the same of a trainer's own model, with its plan.
"""

from dsjax.plan.explanation import Explanation, explain, explain_recipe
from dsjax.plan.planner import plan, plan_recipe, report
from dsjax.plan.replan import replan
from dsjax.plan.result import Plan

__all__ = ["Explanation", "Plan", "explain", "explain_recipe", "plan", "plan_recipe", "replan", "report"]
