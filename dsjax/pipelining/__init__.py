"""Pipeline parallelism: schedules as tables, layers to stages, and the loop that runs them."""
