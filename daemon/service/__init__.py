"""The service: ingest, fleet state, risk, protection, deliveries, REST and the page."""
