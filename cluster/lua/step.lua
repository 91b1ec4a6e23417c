-- The step log: plan a step, commit it.
-- Keys: steps hash, committed set, facts hash, group:<id> hash, trajectory:<id> hash, groups set
--       (read), gone sets (read), ready stream, waiting zset, active zset, ledger hash, tally hash.
-- ARGV: "plan", step, record bytes
--   Returns the committed record of that step, if there is one (nothing is written then).
-- ARGV: "commit", step, record bytes, number of groups, groups ..., trajectories ...
--   Returns 1, or 0 if that step was committed already. Checks come before the first write.
local mode, step, record = ARGV[1], tonumber(ARGV[2]), ARGV[3]
local committed = call('SISMEMBER', base .. 'committed', step) == 1

if mode == 'plan' then
  if committed then return call('HGET', base .. 'steps', step) end
  call('HSET', base .. 'steps', step, record)
  return false
end

if committed then
  -- After a rewind the same steps are executed again: only the version follows.
  if tonumber(call('HGET', base .. 'facts', 'version')) == step - 1 then
    call('HSET', base .. 'facts', 'version', step)
  end
  return 0
end

local last = 4 + tonumber(ARGV[4])
local group_of = {}
for i = 5, last do
  if call('SISMEMBER', base .. 'groups', ARGV[i]) == 0 then return unknown(ARGV[i], 0) end
  if call('EXISTS', key('group', ARGV[i])) == 1 then
    for _, id in ipairs(members_of(ARGV[i])) do group_of[id] = ARGV[i] end
  end
end
for i = last + 1, #ARGV do
  local id = ARGV[i]
  local state = call('HGET', key('trajectory', id), 'state') or gone_as(id)
  if state == 'trained' then
    return invalid('trajectory ' .. id .. ' of step ' .. step .. ' was trained by an earlier step')
  end
  if not state or (state == 'pending' and not group_of[id]) then
    return invalid('trajectory ' .. id .. ' of step ' .. step .. ' is in none of its groups')
  end
end

for i = last + 1, #ARGV do move(ARGV[i], 'trained', '') end
for i = 5, last do
  if call('EXISTS', key('group', ARGV[i])) == 1 then
    for _, id in ipairs(members_of(ARGV[i])) do move(id, 'dropped', 'excluded') end
    acknowledge(ARGV[i])
    enter(ARGV[i], 'trained')
  end
end
call('HSET', base .. 'steps', step, record)
call('SADD', base .. 'committed', step)
call('HSET', base .. 'facts', 'version', step)
return 1
