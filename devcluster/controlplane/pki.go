package main

import (
	"crypto"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/json"
	"encoding/pem"
	"errors"
	"fmt"
	"math/big"
	"net"
	"os"
	"path/filepath"
	"time"
)

// lifetime of every certificate: a cluster for tests does not live longer.
const lifetime = 365 * 24 * time.Hour

// certificateRequest asks for NAME.crt and NAME.key, for a server and a client alike.
type certificateRequest struct {
	Name         string   `json:"name"`
	CommonName   string   `json:"commonName"`
	Organization []string `json:"organization"`
	DNSNames     []string `json:"dnsNames"`
	IPAddresses  []net.IP `json:"ipAddresses"`
}

// issueCertificates runs "kube pki DIRECTORY", with a JSON list of requests on
// standard input. It makes the authority (ca) and the key pair that signs
// service account tokens (sa) when they are not there yet.
func issueCertificates(args []string) error {
	if len(args) != 1 {
		return errors.New("usage: kube pki DIRECTORY < REQUESTS.json")
	}
	directory := args[0]
	var requests []certificateRequest
	if err := json.NewDecoder(os.Stdin).Decode(&requests); err != nil {
		return fmt.Errorf("requests: %w", err)
	}
	if err := os.MkdirAll(directory, 0o700); err != nil {
		return err
	}
	authority, authorityKey, err := loadAuthority(directory)
	if errors.Is(err, os.ErrNotExist) {
		authority, authorityKey, err = newAuthority(directory)
	}
	if err != nil {
		return err
	}
	for _, request := range requests {
		template := &x509.Certificate{
			Subject:     pkix.Name{CommonName: request.CommonName, Organization: request.Organization},
			DNSNames:    request.DNSNames,
			IPAddresses: request.IPAddresses,
			KeyUsage:    x509.KeyUsageDigitalSignature,
			ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth, x509.ExtKeyUsageClientAuth},
		}
		if _, err := issue(directory, request.Name, template, authority, authorityKey); err != nil {
			return fmt.Errorf("%s: %w", request.Name, err)
		}
	}
	return nil
}

func loadAuthority(directory string) (*x509.Certificate, crypto.Signer, error) {
	certificatePEM, err := os.ReadFile(filepath.Join(directory, "ca.crt"))
	if err != nil {
		return nil, nil, err
	}
	keyPEM, err := os.ReadFile(filepath.Join(directory, "ca.key"))
	if err != nil {
		return nil, nil, err
	}
	certificateBlock, _ := pem.Decode(certificatePEM)
	keyBlock, _ := pem.Decode(keyPEM)
	if certificateBlock == nil || keyBlock == nil {
		return nil, nil, errors.New("ca.crt or ca.key holds no PEM block")
	}
	certificate, err := x509.ParseCertificate(certificateBlock.Bytes)
	if err != nil {
		return nil, nil, err
	}
	key, err := x509.ParseECPrivateKey(keyBlock.Bytes)
	return certificate, key, err
}

func newAuthority(directory string) (*x509.Certificate, crypto.Signer, error) {
	if err := newTokenKey(directory); err != nil {
		return nil, nil, err
	}
	template := &x509.Certificate{
		Subject:               pkix.Name{CommonName: "devcluster"},
		KeyUsage:              x509.KeyUsageCertSign | x509.KeyUsageDigitalSignature,
		BasicConstraintsValid: true,
		IsCA:                  true,
	}
	key, err := issue(directory, "ca", template, nil, nil)
	if err != nil {
		return nil, nil, err
	}
	certificate, _, err := loadAuthority(directory)
	return certificate, key, err
}

// issue writes a new key and its certificate, signed by the parent or, without one, by itself.
func issue(directory, name string, template, parent *x509.Certificate, signer crypto.Signer) (crypto.Signer, error) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, err
	}
	if parent == nil {
		parent, signer = template, key
	}
	if template.SerialNumber, err = rand.Int(rand.Reader, new(big.Int).Lsh(big.NewInt(1), 127)); err != nil {
		return nil, err
	}
	template.NotBefore = time.Now().Add(-time.Hour)
	template.NotAfter = time.Now().Add(lifetime)
	der, err := x509.CreateCertificate(rand.Reader, template, parent, key.Public(), signer)
	if err != nil {
		return nil, err
	}
	if err := writeKey(filepath.Join(directory, name+".key"), key); err != nil {
		return nil, err
	}
	return key, writePEM(filepath.Join(directory, name+".crt"), "CERTIFICATE", der)
}

func newTokenKey(directory string) error {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return err
	}
	if err := writeKey(filepath.Join(directory, "sa.key"), key); err != nil {
		return err
	}
	der, err := x509.MarshalPKIXPublicKey(key.Public())
	if err != nil {
		return err
	}
	return writePEM(filepath.Join(directory, "sa.pub"), "PUBLIC KEY", der)
}

func writeKey(path string, key *ecdsa.PrivateKey) error {
	der, err := x509.MarshalECPrivateKey(key)
	if err != nil {
		return err
	}
	return writePEM(path, "EC PRIVATE KEY", der)
}

func writePEM(path, kind string, der []byte) error {
	return os.WriteFile(path, pem.EncodeToMemory(&pem.Block{Type: kind, Bytes: der}), 0o600)
}
