"""The dashboard of `deploy/` without Grafana: its queries at a real Prometheus, and its panels drawn."""
