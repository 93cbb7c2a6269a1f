"""What a step is made of: its operations, what could be fused, and what the compiler fuses."""

from dsjax.plan.explanation.explain import Explanation, explain, explain_recipe, explain_run

__all__ = ["Explanation", "explain", "explain_recipe", "explain_run"]
