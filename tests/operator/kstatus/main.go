// Reads objects as JSON, one a line, and writes for each what kstatus makes of it and, with a Lua check of Argo CD named
// as argument, what that makes of it: {"kstatus": ..., "argo": ...}.
package main

import (
	"bufio"
	"encoding/json"
	"fmt"
	"os"

	lua "github.com/yuin/gopher-lua"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"sigs.k8s.io/cli-utils/pkg/kstatus/status"
)

type verdict struct {
	KStatus string `json:"kstatus"`
	Argo    string `json:"argo"`
}

func main() {
	if err := run(os.Args[1]); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

func run(path string) error {
	check, err := os.ReadFile(path)
	if err != nil {
		return err
	}
	lines := bufio.NewScanner(os.Stdin)
	lines.Buffer(nil, 1<<20)
	answers := json.NewEncoder(os.Stdout)
	for lines.Scan() {
		object := &unstructured.Unstructured{}
		if err := object.UnmarshalJSON(lines.Bytes()); err != nil {
			return err
		}
		computed, err := status.Compute(object)
		if err != nil {
			return err
		}
		health, err := argo(string(check), object.Object)
		if err != nil {
			return err
		}
		if err := answers.Encode(verdict{computed.Status.String(), health}); err != nil {
			return err
		}
	}
	return lines.Err()
}

// argo runs a health check as Argo CD does: the object is the global obj, the answer a table with a status.
func argo(check string, object map[string]any) (string, error) {
	machine := lua.NewState()
	defer machine.Close()
	machine.SetGlobal("obj", value(machine, object))
	if err := machine.DoString(check); err != nil {
		return "", err
	}
	table, ok := machine.Get(-1).(*lua.LTable)
	if !ok {
		return "", fmt.Errorf("the check returns no table")
	}
	return lua.LVAsString(table.RawGetString("status")), nil
}

func value(machine *lua.LState, from any) lua.LValue {
	switch from := from.(type) {
	case map[string]any:
		table := machine.NewTable()
		for key, item := range from {
			table.RawSetString(key, value(machine, item))
		}
		return table
	case []any:
		table := machine.NewTable()
		for _, item := range from {
			table.Append(value(machine, item))
		}
		return table
	case string:
		return lua.LString(from)
	case bool:
		return lua.LBool(from)
	case int64:
		return lua.LNumber(from)
	case float64:
		return lua.LNumber(from)
	}
	return lua.LNil
}
