"""HTTP clients of completion and reward servers: requests, retries, answers, weights sent to a server."""
