"""Steps of each kind (on given records, of RL), rewards, the evaluation, and the phases of a run."""
