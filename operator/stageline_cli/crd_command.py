"""`stageline crd`: the CustomResourceDefinition, ready for `kubectl apply -f -`."""

import click

from stageline_api.manifests.crd import render_crd


@click.command()
def crd() -> None:
    """Print the CustomResourceDefinition of PipelineModel."""
    click.echo(render_crd(), nl=False)
