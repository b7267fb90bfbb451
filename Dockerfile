# Operator, gateway and the progress reader of driver pods: one image. Build from the repository root:
#   docker build -t everloop-operator .
FROM python:3.11-slim AS packages

COPY requirements/operator.txt /opt/requirements.txt
RUN python -m venv --without-pip /opt/packages \
    && pip --python /opt/packages/bin/python install --no-cache-dir --no-deps --require-hashes -r /opt/requirements.txt

COPY operator/everloop_operator /opt/everloop/everloop_operator
COPY operator/everloop_gateway /opt/everloop/everloop_gateway
COPY operator/everloop_metrics /opt/everloop/everloop_metrics
COPY operator/everloop_progress /opt/everloop/everloop_progress
COPY trainer_image/everloop_http /opt/everloop/everloop_http
COPY trainer_image/everloop_losses /opt/everloop/everloop_losses
# A checkout made under umask 077 is readable to its owner only; what runs is user 1000.
RUN chmod -R a+rX /opt/everloop && python -m compileall -q /opt/everloop

# What runs has no installer and no other build tool in it.
FROM python:3.11-slim

ENV PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1 \
    PYTHONPATH=/opt/everloop \
    PATH=/opt/packages/bin:$PATH \
    HOME=/tmp

COPY --from=packages /opt/packages /opt/packages
COPY --from=packages /opt/everloop /opt/everloop
RUN useradd --uid 1000 --no-create-home --home-dir /tmp everloop \
    && pip uninstall --yes --root-user-action ignore setuptools wheel pip

USER 1000:1000
EXPOSE 8000 8081 8083
ENTRYPOINT ["python"]
