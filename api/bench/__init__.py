"""Load on any server with OpenAI's routes: generators, their statistics, reports, plots and traces."""
