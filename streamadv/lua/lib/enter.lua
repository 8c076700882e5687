-- enter(group, spec, limits, holder): make sure that a group without a tombstone is open, with this size and role. It
-- is opened if need be; if its first caller had withdrawn it, `holder` takes it over. The caller saves the group.
-- KEYS  open, groups, ledger, trainer, sizes
-- Returns  whether this call opened it or took it over, and nil or a refusal: see `open_group`, {'mismatch', size, role},
--          or {'broken'} if its hash is not what the scripts wrote
local function enter(group, spec, limits, holder)
  if group.state == 'broken' then return false, {'broken'} end
  if group.state == 'none' then return true, open_group(group, spec, limits) end
  if group.size ~= tonumber(spec.size) or group.role ~= spec.role then
    return false, {'mismatch', string.format('%d', group.size), group.role}
  end
  if not is_withdrawn(group) then return false end
  local trainer = redis.call('HMGET', keys.trainer, 'epoch', 'version')
  group.holders, group.epoch, group.version = holder, trainer[1] or '0', trainer[2] or '0'
  change(group, 'holders', holder)
  change(group, 'epoch', group.epoch)
  change(group, 'version', group.version)
  redis.call('ZADD', keys.open, string.format('%.17g', now_ms() + spec.deadline_ms), spec.id)
  play(group, limits.producer)
  return true
end
