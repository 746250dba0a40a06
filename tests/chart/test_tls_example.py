"""The example of a model with certificates from cert-manager fits what the model's pods ask of each other."""

import yaml

from processes.repository_files import ROOT
from stageline_api.resource.pipeline_model import PipelineModel
from stageline_operator.planner.objects.config import build_config


def test_the_example_asks_for_the_certificate_that_its_pods_need() -> None:
    documents = list(yaml.safe_load_all((ROOT / "examples" / "tls" / "issued_certificate.yaml").read_text()))
    model = PipelineModel.model_validate(next(each for each in documents if each["kind"] == "PipelineModel"))
    assert model.spec.network.tls is not None
    [certificate] = [
        each["spec"]
        for each in documents
        if each["kind"] == "Certificate" and each["spec"]["secretName"] == model.spec.network.tls.secret_name
    ]
    tls = build_config(model).tls
    assert tls is not None
    assert certificate["dnsNames"] == [tls.name]
    assert {"server auth", "client auth"} <= set(certificate["usages"])
    issuers = {each["metadata"]["name"]: each["spec"] for each in documents if each["kind"] == "Issuer"}
    authority = issuers[certificate["issuerRef"]["name"]]["ca"]["secretName"]
    assert authority in {each["spec"]["secretName"] for each in documents if each["kind"] == "Certificate"}
