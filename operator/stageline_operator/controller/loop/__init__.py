"""From a watch event to a finished pass: the queue, its workers, one reconcile, its Events."""
